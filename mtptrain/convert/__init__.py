"""Heads in the formats of engines and of published checkpoints."""
