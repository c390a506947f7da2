"""Client of OpenAI-compatible servers, with extensions for Tandem; no Qt.

Must not import the window's packages; `app.remote.page` is its dialog.
"""
