"""Shared widgets; they import none of the app's feature packages."""
