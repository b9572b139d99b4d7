"""Texts as tokens with their KV caches: alone, in batches, and as files."""
