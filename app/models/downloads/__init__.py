"""Searching for models on Hugging Face, and downloading from there or from links."""
