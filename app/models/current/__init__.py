"""The model in use: its session, presenter and views."""
