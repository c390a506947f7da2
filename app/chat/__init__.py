"""Conversations: their data, files, session, presenter and views.

Imports no other subject of the app.
"""

import sys


def close_formulas() -> None:
    """End the child that draws formulas, if there is one: nothing is imported for that."""
    formulas = sys.modules.get("app.chat.formulas")
    if formulas is not None:
        formulas.formula_pictures().close()
