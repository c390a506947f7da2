"""What is shown of a newer release."""
