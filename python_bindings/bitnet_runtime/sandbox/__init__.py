"""Programs and data of strangers run in a process of their own, within limits."""
