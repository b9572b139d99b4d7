"""The models of a server: which are in memory, their sessions, and what each computes next."""
