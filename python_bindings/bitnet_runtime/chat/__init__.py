"""Conversations as prompts, by the chat template that a model file holds, and tool calls."""
