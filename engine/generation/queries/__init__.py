"""Questions to a loaded model, answered between two passes of its answers.

Imports no front end: neither `api` nor `host`, and not `events`, which names the questions.
"""
