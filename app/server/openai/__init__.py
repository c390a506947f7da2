"""OpenAI's protocol: chat completions, completions, embeddings, models and what goes with them."""
