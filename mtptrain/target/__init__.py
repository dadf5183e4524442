"""The frozen target: its source, the supported model families, its frozen parts, and the whole model."""
