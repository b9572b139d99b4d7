"""A published model as a packed file, verified."""
