"""Search and download of models from Hugging Face and from links."""
