"""Images in: decoding and resizing, and the encoders that turn them into embeddings."""
