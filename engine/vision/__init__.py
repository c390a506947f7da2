"""Vision: decoding and resizing of images, and the encoders that turn them into embeddings."""
