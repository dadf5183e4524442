"""Stages 1 and 2: prompts and hidden states."""
