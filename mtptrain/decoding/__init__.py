"""Speculative decoding: drafters, the draft and verify loop, and measures of acceptance."""
