"""Models that other machines compute: addresses, keys, requests, and an engine host over them.

Speaks OpenAI's interface, and asks more of a Tandem. Knows no Qt; `app.remote.page` is its dialog
in the window. Must not import the window's packages.
"""
