"""Conversations: their data, files, session, presenter and views.

Imports no other subject of the app.
"""

import sys


def close_formulas() -> None:
    """End the formula renderer's child process, if `formulas` was ever imported."""
    formulas = sys.modules.get("app.chat.formulas")
    if formulas is not None:
        formulas.formula_cache().close()
