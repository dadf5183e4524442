"""Attention of heads: in training over all depths, in decoding over the cache."""
