"""Options of a load besides the shares: context length, KV cache type, threads, links."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import QGridLayout, QSpinBox, QWidget

from app.core.translation import tr, tr_later
from app.core.units import context_text, tokens_text
from app.devices.split.settings import WINDOW_OPTIONS, SplitSettings
from app.devices.split.views.choice_fields import ContextSlider, choice_box, kv_type_entries
from app.devices.split.views.rare_options import NumberField, RareOptions
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.layout import scaled
from app.widgets.text import ElidedLabel, label, set_tip
from app.widgets.theme import set_role
from engine import PEER_MODES, KVTypes, kv_types

FIRST_STOP = 512
"""Shortest context that the slider offers, in tokens."""
CONTEXT_IF_UNKNOWN = 32768
"""Longest context that is offered for models that do not name theirs, in tokens."""
PEER_NAMES = {
    "auto": tr_later("Direct if faster"), "on": tr_later("Direct"),
    "off": tr_later("Through host memory"),
}  # fmt: skip
PEER_HINTS = {
    "auto": tr_later(
        "GPUs write directly into each other's memory where a test on this machine shows that "
        "it is safe and faster"
    ),
    "on": tr_later(
        "GPUs write directly into each other's memory even where host memory is faster; never "
        "where the test failed"
    ),
    "off": tr_later(
        "GPUs never access each other's memory. Choose this if answers are gibberish or the "
        "machine hangs"
    ),
}


def context_stops(n_ctx_train: int) -> list[int]:
    """Return the powers of two from 512, and last the length that the model was trained for."""
    last = n_ctx_train or CONTEXT_IF_UNKNOWN
    stops = []
    stop = FIRST_STOP
    while stop < last:
        stops.append(stop)
        stop *= 2
    return [*stops, last]


class LoadFields(QWidget):
    """Fields for the settings other than shares.

    Attributes:
        rare: fields that few people need.
    """

    changed = Signal(str, object)  # name and value of a setting
    gesture_began = Signal()
    gesture_ended = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._n_ctx_train, self._stops = 0, list[int]()
        self.context_slider = ContextSlider()
        self.context_slider.setAccessibleName(tr("Context length"))
        self.context_note = ElidedLabel()
        self.context_note.setProperty("role", "muted")
        self.context = QSpinBox()
        self.context.setAccessibleName(tr(WINDOW_OPTIONS["n_ctx"].title))
        self.context.setKeyboardTracking(False)
        scaled(self.context, self.context.setFixedWidth, 96)
        self.kv_type = choice_box(kv_type_entries())
        self.kv_type.setAccessibleName(tr(WINDOW_OPTIONS["kv_type"].title))
        self.p2p = choice_box([(mode, PEER_NAMES[mode], PEER_HINTS[mode]) for mode in PEER_MODES])
        self.p2p.setAccessibleName(tr(WINDOW_OPTIONS["p2p"].title))
        self.p2p_label = label(tr("GPU to GPU"), "muted")
        self.threads = NumberField(WINDOW_OPTIONS["cpu_threads"], None)
        self.threads.setAccessibleName(tr(WINDOW_OPTIONS["cpu_threads"].title))
        scaled(self.threads, self.threads.setFixedWidth, 96)
        self.rare = RareOptions()
        self.threads_label = label(tr("Threads"), "muted")
        for field in (self.context_slider, self.context, self.kv_type, self.threads, self.p2p):
            ignore_wheel(field)
        self._build()
        self._connect()
        self.set_model_context(0)

    def _connect(self) -> None:
        self.context_slider.valueChanged.connect(self._on_slider)
        self.context_slider.sliderPressed.connect(self.gesture_began)
        self.context_slider.sliderReleased.connect(self.gesture_ended)
        self.context.valueChanged.connect(partial(self.changed.emit, "n_ctx"))
        self.kv_type.currentIndexChanged.connect(self._report_kv_type)
        self.rare.type_v_changed.connect(self._report_kv_type)
        self.p2p.currentIndexChanged.connect(
            lambda _: self.changed.emit("p2p", self.p2p.currentData())
        )
        self.threads.chosen.connect(partial(self.changed.emit, "cpu_threads"))
        self.rare.changed.connect(self.changed)

    def set_model_context(self, n_ctx_train: int) -> None:
        """Offer context lengths up to the one the model was trained for; 0 is unknown."""
        self._n_ctx_train = n_ctx_train
        self._offer(n_ctx_train)

    def _offer(self, most: int) -> None:
        """Offer context lengths up to `most` tokens; 0 is unknown."""
        if self._stops == context_stops(most):
            return
        self._stops = context_stops(most)
        with QSignalBlocker(self.context_slider), QSignalBlocker(self.context):
            self.context_slider.set_stops(self._stops)
            self.context.setRange(1, self._stops[-1])
            self.context.setSingleStep(max(1, min(FIRST_STOP, self._stops[-1] // 8)))
        names = ", ".join(context_text(stop) for stop in self._stops)
        set_tip(self.context_slider, tr("Context length in tokens: {names}").format(names=names))

    def set_settings(self, settings: SplitSettings, n_ctx: int) -> None:
        """Show settings; `n_ctx` is the context length in effect, in tokens."""
        self._offer(round(self._n_ctx_train * max(1.0, settings.rope_factor)))
        n_ctx = min(n_ctx, self._stops[-1])
        with (
            QSignalBlocker(self.context_slider), QSignalBlocker(self.kv_type),
            QSignalBlocker(self.p2p),
        ):  # fmt: skip
            self.context_slider.setValue(max(0, bisect_right(self._stops, n_ctx) - 1))
            self.kv_type.setCurrentIndex(self.kv_type.findData(kv_types(settings.kv_type).k))
            self.p2p.setCurrentIndex(self.p2p.findData(settings.p2p))
            set_tip(self.p2p, tr(PEER_HINTS[settings.p2p]))
        show_number(self.context, n_ctx)
        self.threads.show_value(settings.cpu_threads)
        self.rare.set_settings(settings)
        has_cpu = any(settings.ranks[i].device == "cpu" for i in settings.active)
        self.threads.setVisible(has_cpu)
        self.threads_label.setVisible(has_cpu)
        for field in (self.p2p, self.p2p_label):
            field.setVisible(settings.n_gpus > 1)

    def set_most(self, most: int | None, n_ctx: int) -> None:
        """Mark the longest context that fits; `n_ctx` is the one in effect, both in tokens."""
        self.context_slider.set_most(most)
        if most is None:
            text = ""
        elif not most:
            text = tr("No context fits.")
        elif most >= self._stops[-1]:
            text = tr("The whole context fits.")
        else:
            text = tr("Up to {tokens} fit.").format(tokens=tokens_text(most))
        self.context_note.set_full_text(text)
        is_over = most is not None and n_ctx > most
        set_role(self.context_note, "shortage" if is_over else "muted")
        said = f"{tokens_text(n_ctx)}. {text}".replace("\u202f", "")
        self.context_slider.setAccessibleDescription(said)

    def _report_kv_type(self) -> None:
        """Report both types; values have that of the keys unless one is chosen for them."""
        k = self.kv_type.currentData()
        self.changed.emit("kv_type", str(KVTypes(k, self.rare.type_v.currentData() or k)))

    def _on_slider(self, stop: int) -> None:
        self.changed.emit("n_ctx", self._stops[stop])

    def _build(self) -> None:
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 4, 0, 4)
        layout.setHorizontalSpacing(10)
        layout.setVerticalSpacing(8)
        layout.setColumnStretch(1, 1)
        layout.addWidget(label(tr("Context"), "muted"), 0, 0)
        layout.addWidget(self.context_slider, 0, 1, 1, 2)
        layout.addWidget(self.context, 0, 3)
        layout.addWidget(self.context_note, 1, 1, 1, 3)
        layout.addWidget(kv_label := label(tr("KV cache"), "muted"), 2, 0)
        layout.addWidget(self.kv_type, 2, 1)
        layout.addWidget(self.threads_label, 2, 2, Qt.AlignmentFlag.AlignRight)
        layout.addWidget(self.threads, 2, 3)
        layout.addWidget(self.p2p_label, 3, 0)
        layout.addWidget(self.p2p, 3, 1, 1, 3)
        layout.addWidget(self.rare, 4, 0, 1, 4)
        for caption, box in ((kv_label, self.kv_type), (self.p2p_label, self.p2p)):
            caption.setBuddy(box)  # from which screen readers on Linux have a box's name
