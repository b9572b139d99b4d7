"""Answers, from the prompt to the last piece of text."""
