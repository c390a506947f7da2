"""What all parts of the application share: settings, translation, background jobs, the engine
client."""
