"""Text to tokens and back, with the tokenizer that a model file holds."""
