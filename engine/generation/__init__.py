"""Generation of text: session, prefill and decode, stop rules, scoring, state files.

Imports no front end: neither `api` nor `host`.
"""
