"""The command line that all programs share: Hydra's overrides, and one line for each mistake."""
