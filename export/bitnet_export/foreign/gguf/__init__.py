"""GGUF, the file of llama.cpp and its relatives."""
