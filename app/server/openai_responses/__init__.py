"""OpenAI's Responses protocol, without stored conversations."""
