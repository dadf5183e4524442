"""Stage 2: runs the target over the prompts, and fills the store."""
