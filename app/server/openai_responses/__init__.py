"""OpenAI's Responses protocol, without a state: translated to commands and events and back."""
