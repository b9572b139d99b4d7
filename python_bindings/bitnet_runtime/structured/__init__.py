"""Answers in a format that was asked for: a JSON schema, a regular expression, a grammar."""
