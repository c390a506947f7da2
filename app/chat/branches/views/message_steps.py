"""What can be done with a message, and the menu that offers it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from PySide6.QtWidgets import QMenu, QWidget

from app.core.translation import tr
from app.widgets.text import caption_text


class MessageStep(Enum):
    """A step that a message's menu offers; `EDIT` is done in its own view."""

    EDIT = "edit"
    REGENERATE = "regenerate"
    FORK = "fork"
    DELETE = "delete"
    DELETE_BRANCH = "delete branch"


def step_menu(parent: QWidget, *, is_answer: bool, on_step: Callable[[MessageStep], None]) -> QMenu:
    """Return the menu of a message.

    Args:
        on_step: called with the chosen step.
    """
    menu = QMenu(parent)
    texts = {MessageStep.EDIT: tr("Edit answer") if is_answer else tr("Edit and send again")}
    if is_answer:
        texts[MessageStep.REGENERATE] = tr("Regenerate")
    texts[MessageStep.FORK] = tr("New chat from here")
    for step, text in texts.items():
        menu.addAction(caption_text(text)).triggered.connect(lambda _, s=step: on_step(s))
    menu.addSeparator()
    for step, text in (
        (MessageStep.DELETE, tr("Delete message")),
        (MessageStep.DELETE_BRANCH, tr("Delete with all that follows")),
    ):
        menu.addAction(caption_text(text)).triggered.connect(lambda _, s=step: on_step(s))
    return menu
