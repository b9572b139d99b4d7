"""Evaluation: losses and accuracies on held-out data."""
