"""Routes of OpenAI's protocol that take texts or tokens as they are, without a chat template."""
