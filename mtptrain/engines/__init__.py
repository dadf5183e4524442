"""Converts heads to the formats of engines, and published checkpoints to heads."""
