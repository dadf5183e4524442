"""What a run will need, counted before anything is loaded."""
