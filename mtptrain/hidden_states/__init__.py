"""The store of hidden states: its format, its writer and its readers."""
