"""Pictures as the numbers that a model takes, and as vectors."""
