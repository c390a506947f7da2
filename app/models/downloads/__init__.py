"""Models from Hugging Face and from links: search, what would fit, and downloads that go on."""
