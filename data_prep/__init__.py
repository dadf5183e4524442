"""Stages 1 and 2: prompts and hidden states.

Only programs import these modules, so importing them prepares the process.
"""

from mtptrain.utils.startup import prepare_process

prepare_process()
