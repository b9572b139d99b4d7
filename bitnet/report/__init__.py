"""One page about a run."""
