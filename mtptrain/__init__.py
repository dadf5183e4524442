"""Train, measure and export speculative-decoding draft heads for a frozen target."""
