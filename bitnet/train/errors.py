"""Errors that end a run, or keep it from starting."""

from __future__ import annotations


class TrainingError(ValueError):
    """The run cannot start or continue."""
