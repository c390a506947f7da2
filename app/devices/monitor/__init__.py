"""Monitor for devices, speed and ranks; the only feature package it imports is `split`."""
