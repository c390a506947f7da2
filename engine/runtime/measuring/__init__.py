"""Speeds of devices, weights and links, kernel times, and tuning of kernel configurations."""
