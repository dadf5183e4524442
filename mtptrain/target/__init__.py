"""The frozen target: where it comes from, which families it may be of, its frozen parts, and the whole model."""
