"""Pictures of formulas in LaTeX, drawn by ziamath in a child process with limits.

A formula that a model writes may take for ever: ziamath's time doubles with each level of
fractions. `program` is the child, which knows no Qt; `pictures` is the window's side.
"""

import sys


def close_formulas() -> None:
    """End what draws formulas, if there were any: nothing is imported for that."""
    drawing = sys.modules.get("app.chat.formulas.pictures")
    if drawing is not None:
        drawing.formula_pictures().close()
