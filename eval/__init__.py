"""Stage 4: evaluation of heads."""
