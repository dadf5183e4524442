"""Stages 1 and 2: prompts and hidden states."""

import mtptrain  # noqa: F401  # sets the environment, before torch is loaded
