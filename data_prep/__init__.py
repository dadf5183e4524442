"""Stages 1 and 2: prompts and hidden states. All its modules belong to programs."""

from mtptrain.utils.startup import prepare_process

prepare_process()
