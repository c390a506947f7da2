"""OpenAI's Responses protocol, stateless."""
