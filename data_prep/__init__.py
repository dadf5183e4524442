"""Stages 1 and 2: prompts and hidden states.

Only programs import these modules, so importing them prepares the process. Settings and data of a user that cannot be
used raise UserError, and a row that is left out raises ConversationRefused, with the reason.
"""

from mtptrain.utils.startup import prepare_process

prepare_process()
