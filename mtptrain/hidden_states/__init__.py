"""The store of hidden states: its format, and what writes and reads it."""
