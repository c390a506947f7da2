"""Answers with a form that was asked for: which tokens it allows next, and where it begins."""
