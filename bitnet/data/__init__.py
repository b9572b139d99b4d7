"""From text and conversations to token ids on disk, and to batches."""
