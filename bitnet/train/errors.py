"""What ends a run, or keeps it from beginning."""

from __future__ import annotations


class TrainingError(ValueError):
    """The run cannot begin or go on."""
