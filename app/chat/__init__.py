"""Conversations: their data, files, session, presenter and views.

It imports no other subject of the app.
"""

import sys


def close_formulas() -> None:
    """Stop the formula renderer's child process, if `formulas` has been imported."""
    formulas = sys.modules.get("app.chat.formulas")
    if formulas is not None:
        formulas.formula_cache().close()
