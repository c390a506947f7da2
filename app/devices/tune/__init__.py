"""Search for the fastest split by measuring; the only feature package it imports is `split`."""
