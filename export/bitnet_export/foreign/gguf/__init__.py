"""GGUF, the file format of llama.cpp and its forks."""
