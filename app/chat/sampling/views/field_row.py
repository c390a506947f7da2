"""A field of sampling in the panel: its title, an editor, a way back, and who samples with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from functools import partial
from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt
from PySide6.QtWidgets import QGridLayout, QWidget

from app.chat.sampling.views.editors import OnChange, Setter, is_wide, make_editor
from app.chat.sampling.views.order_editor import OrderEditor
from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.sizes import scaled
from app.widgets.text import label, set_tip
from app.widgets.theme import set_role

EDITOR_WIDTH = 124
"""Width of an editor beside its title, in pixels."""


class FieldRow:
    """Label, editor and reset button of one field.

    Args:
        spec: field of `SamplingParams`.
        on_change: called with the field's name and the value that a person has set.
        on_reset: called with the field's name.

    Attributes:
        note: says below the title that the host samples because of this field; else hidden.
        problem: says below the editor what is wrong with the value; hidden if nothing is.
    """

    def __init__(
        self, spec: Field[Any], on_change: Callable[[str, object], None],
        on_reset: Callable[[str], None],
    ) -> None:  # fmt: skip
        meta = spec.metadata
        self._title, self._is_wide = tr(str(meta["title"])), is_wide(meta)
        self.label, self.note = label(self._title), label(tr("sampled on the host"), "warn")
        self.problem = label(role="warn")
        made = _order_editor if spec.name == "samplers" else partial(make_editor, meta)
        self.editor, self._set = made(lambda value: on_change(spec.name, value))
        self.reset = IconButton("reset", tr("Reset {title}").format(title=self._title), size=14)
        self.reset.clicked.connect(lambda: on_reset(spec.name))
        self._build(tr(str(meta["help"])))

    def add_to(self, grid: QGridLayout) -> None:
        """Add the widgets below those that a grid has."""
        row, side = grid.rowCount(), Qt.AlignmentFlag.AlignVCenter
        grid.addWidget(self.label, row, 0, side)
        grid.addWidget(self.reset, row, 2, side)
        if self._is_wide:
            grid.addWidget(self.editor, row + 1, 0, 1, 3)
        else:
            grid.addWidget(self.editor, row, 1, side)
        grid.addWidget(self.note, row + 2, 0, 1, 3)
        grid.addWidget(self.problem, row + 3, 0, 1, 3)

    def show_value(self, value: object) -> None:
        """Show a value without a signal."""
        with QSignalBlocker(self.editor):
            self._set(value)

    def mark(self, *, is_changed: bool, is_on_host: bool) -> None:
        """Say with a dot that the value is not the default, and that the host samples for it."""
        self.label.setText(f"● {self._title}" if is_changed else self._title)
        set_role(self.label, "" if is_changed else "muted")
        self.reset.setVisible(is_changed)
        self.note.setVisible(is_on_host)

    def show_problem(self, problem: str) -> None:
        """Say what is wrong with the value, in a sentence; "" if nothing is."""
        self.problem.setText(problem)
        self.problem.setVisible(bool(problem))

    def _build(self, tip: str) -> None:
        self.editor.setAccessibleName(self._title)
        self.editor.setAccessibleDescription(tip)
        set_tip(self.editor, tip)
        set_tip(self.label, tip)
        self.label.setBuddy(self.editor)
        self.label.setWordWrap(True)
        if not self._is_wide:
            scaled(self.editor, self.editor.setFixedWidth, EDITOR_WIDTH)
        set_role(self.label, "muted")
        keep = self.reset.sizePolicy()
        keep.setRetainSizeWhenHidden(True)
        self.reset.setSizePolicy(keep)
        self.reset.setVisible(False)
        self.note.setVisible(False)
        self.problem.setWordWrap(True)
        self.problem.setVisible(False)


def _order_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    order = OrderEditor()
    order.changed.connect(on_change)
    return order, order.show_steps
