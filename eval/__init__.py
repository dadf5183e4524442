"""Stage 4: what a head is worth."""
