"""Files that guess for a loaded model: draft models, their settings and memory, and MTP blocks."""
