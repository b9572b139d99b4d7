"""How good a model is: its loss on text."""
