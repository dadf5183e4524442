"""Formats of prompts and draft vocabularies on disk, and the identities of stored data."""
