"""Stage 4: evaluation of heads.

Only programs import these modules, so importing them prepares the process.
"""

from mtptrain.utils.startup import prepare_process

prepare_process()
