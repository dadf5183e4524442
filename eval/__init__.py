"""Stage 4: evaluation of heads. All its modules belong to programs."""

from mtptrain.utils.startup import prepare_process

prepare_process()
