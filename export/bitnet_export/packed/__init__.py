"""The packed file of FORMAT.md: its bytes, written and read."""
