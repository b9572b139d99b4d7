"""Readers and writers of foreign formats."""
