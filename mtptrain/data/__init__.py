"""What prompts are on disk, and the hashes that say what belongs together."""
