"""A training checkpoint as a packed file, verified."""
