"""A training run: its options, its parts, its steps, its checkpoints."""
