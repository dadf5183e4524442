"""Converts heads to the formats of engines, and from those of published checkpoints."""
