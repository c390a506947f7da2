"""Links between devices, reported and measured; the only feature package it imports is `split`."""
