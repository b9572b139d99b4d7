"""From text and conversations to token ids on disk, and to batches."""

SOURCES = ("data", "mixture", "chat", "preference")
"""Options that say what a run learns from, one kind of data each."""
