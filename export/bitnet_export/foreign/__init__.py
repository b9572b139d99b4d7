"""The formats of others, read and written."""
