"""Residual streams of the target, by one backend or another, into the shards of a store."""
