"""Attention of heads, in training and in decoding."""
