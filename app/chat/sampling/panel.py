"""The sampling panel: system prompt, presets, and fields built from `SamplingParams` metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from PySide6.QtCore import QSignalBlocker, Qt, Signal, Slot
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QCheckBox, QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.chat.sampling.presets import Chosen, PresetMenu, params_of
from app.chat.sampling.text_editors import PromptEditor
from app.core.settings import changed_sampling
from app.core.translation import tr, tr_later
from app.widgets.buttons import button
from app.widgets.controls import keep_margin
from app.widgets.text import caption_text, label, set_tip
from engine import EngineError, SamplingParams

if TYPE_CHECKING:
    from app.chat.sampling.fields import FieldGroup, FieldRow

FORMS: Final = ("json_schema", "grammar", "regex")
"""Fields for structured output."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    tr_later("Token selection"): (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma",
    ),
    tr_later("The answer"): (
        "max_tokens", "stop", "banned_strings", "on_overflow", "ignore_eos", "seed",
    ),
    tr_later("Structured output"): FORMS,
    tr_later("Repetition"): (
        "repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n", "dry_breakers",
    ),
    tr_later("Variety"): (
        "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
        "mirostat", "mirostat_tau", "mirostat_eta",
    ),
    tr_later("Sampler order and logit bias"): ("samplers", "logit_bias"),
}  # fmt: skip
"""Group titles and the fields in each group; the last group also gets all remaining fields."""


class SamplingPanel(QScrollArea):
    """Editor for the system prompt, and for the sampling values of one chat or all chats.

    Attributes:
        own: checkbox that gives the open chat its own values.
        host_note: note that says why tokens are sampled on the CPU.
    """

    chosen_changed = Signal(object)  # dict of values by field, as set by the user
    own_toggled = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(tr("Sampling"))
        self._recommended = SamplingParams()
        self._chosen: dict[str, Any] = {}
        self._on_host: Collection[str] = ()
        self._form_problem = ""
        self._rows: dict[str, FieldRow] = {}
        self._groups: list[FieldGroup] = []
        self.prompt, self.presets = PromptEditor(), PresetMenu()
        self._heading, self.host_note = label(role="heading"), label(role="warn")
        self.own = QCheckBox(caption_text(tr("Custom values for this chat")))
        self._reset = button(tr("Reset all"), "quiet", tr("Reset sampling"))
        self._fields = QVBoxLayout()
        self._fields.setSpacing(2)
        self._build()
        self.own.toggled.connect(self.own_toggled)
        self._reset.clicked.connect(self.reset)
        self.set_scope(is_own=False)
        self.set_host_note("", ())

    @property
    def params(self) -> SamplingParams:
        """The values on screen."""
        return params_of(self._chosen, self._recommended)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values set by the user, by field."""
        return dict(self._chosen)

    def show_values(self, chosen: Chosen, recommended: SamplingParams) -> None:
        """Show values without emitting a signal.

        Args:
            chosen: values set by the user.
            recommended: values for all other fields.
        """
        self._chosen, self._recommended = dict(chosen), recommended
        self._refresh()

    def set_params(self, params: SamplingParams) -> None:
        """Set all values as if the user had edited them."""
        self._choose(changed_sampling(params, self._recommended))
        self._refresh()

    @Slot()
    def reset(self) -> None:
        """Reset all fields to the values that the model recommends."""
        self.set_params(self._recommended)

    def set_scope(self, *, is_own: bool) -> None:
        """Show whether the values are the chat's own or shared by all chats."""
        shown = tr("Sampling for this chat") if is_own else tr("Sampling for all chats")
        self._heading.setText(shown)
        with QSignalBlocker(self.own):
            self.own.setChecked(is_own)

    def set_host_note(self, why: str, names: Collection[str]) -> None:
        """Show why tokens are sampled on the CPU.

        Args:
            why: a sentence; "" if the GPUs sample or there are no GPUs.
            names: the fields that require it.
        """
        self.host_note.setText(why)
        self.host_note.setVisible(bool(why))
        self._on_host = names
        self._mark()

    @Slot(str)
    def set_form_problem(self, problem: str) -> None:
        """Show an error in the structured output options; "" hides it."""
        self._form_problem = problem
        self._mark()

    @property
    def rows(self) -> Mapping[str, FieldRow]:
        """Rows by field name, created on first use."""
        if not self._rows:
            self._make_rows()
            self._refresh()
        return self._rows

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        _ = self.rows

    def _make_rows(self) -> None:
        from app.chat.sampling.fields import (
            FieldGroup,  # late: the panel starts hidden
            FieldRow,
        )

        specs = {spec.name: spec for spec in fields(SamplingParams)}
        rows = {name: FieldRow(specs[name], self._on_field, self._on_reset) for name in specs}
        grouped = {name for names in GROUPS.values() for name in names}
        rest = tuple(name for name in specs if name not in grouped)
        for number, (title, names) in enumerate(GROUPS.items(), 1):
            shown = names + rest if number == len(GROUPS) else names
            group = FieldGroup(tr(title), {name: rows[name] for name in shown}, is_open=number == 1)
            self._groups.append(group)
            self._fields.addWidget(group)
        self._rows = rows

    def _refresh(self) -> None:
        params = self.params
        for name, row in self._rows.items():
            row.show_value(getattr(params, name))
        self._mark()

    def _mark(self) -> None:
        changed = changed_sampling(self.params, self._recommended)
        self._reset.setEnabled(bool(changed))
        for name, row in self._rows.items():
            row.mark(is_changed=name in changed, is_on_host=name in self._on_host)
            has_form = name in FORMS and bool(getattr(self.params, name).strip())
            row.show_problem(self._form_problem if has_form else "")
        for group in self._groups:
            group.set_changed(sum(name in changed for name in group.rows))

    def _on_field(self, name: str, value: object) -> None:
        try:
            accepted = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        except EngineError:
            return  # not a value yet, for example a half-typed seed
        chosen = {**self._chosen, name: accepted}
        if accepted == getattr(self._recommended, name):
            del chosen[name]
        self._choose(chosen)

    def _on_reset(self, name: str) -> None:
        self._choose({other: value for other, value in self._chosen.items() if other != name})
        row = self._rows[name]
        row.show_value(getattr(self.params, name))
        row.editor.setFocus()

    def _choose(self, chosen: dict[str, Any]) -> None:
        self._chosen = chosen
        self._mark()
        self.chosen_changed.emit(dict(chosen))

    def _build(self) -> None:
        head = QHBoxLayout()
        head.addWidget(self._heading, 1)
        head.addWidget(self.presets)
        scope = QHBoxLayout()
        scope.addWidget(self.own, 1)
        scope.addWidget(self._reset)
        self.host_note.setWordWrap(True)
        set_tip(self.own, tr("The values then apply to this chat only and are saved with it."))
        content = QWidget()
        content.setProperty("role", "panel")
        content.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        layout = QVBoxLayout(content)
        layout.setContentsMargins(16, 12, 16, 16)
        layout.setSpacing(8)
        layout.addWidget(self.prompt)
        layout.addSpacing(4)
        layout.addLayout(head)
        layout.addLayout(scope)
        layout.addWidget(self.host_note)
        layout.addLayout(self._fields)
        layout.addStretch()
        self.setWidget(content)
        keep_margin(self, layout)
