"""Stage 3: batches, losses, the training step, checkpoints and validation."""
