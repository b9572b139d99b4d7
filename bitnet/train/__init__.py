"""A training run: its parts, its steps, its checkpoints. How it comes to begin: `bitnet.setup`."""
