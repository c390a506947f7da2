"""Memory of a loaded model: what it takes of each device, and what is cached there.

Imports nothing of `runtime` but a rank's type.
"""
