"""Options of a load besides the shares: context length, KV cache type, threads, links."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QGridLayout,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.split.settings import (
    MAX_BATCH,
    MAX_DRAFT_VOCAB,
    MAX_PARALLEL,
    MAX_ROPE_BASE,
    MAX_ROPE_FACTOR,
    MAX_THREADS,
    OWN_BLOCK,
    SplitSettings,
)
from app.split.views.choice_fields import EncoderDeviceField, GgufField
from app.split.views.context_slider import ContextSlider
from app.theme import icon, set_role, theme, theme_signals
from app.translation import tr, tr_later
from app.units import MIB, context_text, tokens_text
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.sizes import scaled
from app.widgets.text import ElidedLabel, label, plain_tip, set_tip
from engine import (
    DEFAULT_DRAFTED,
    KV_TYPES,
    LEAST_DRAFT_VOCAB,
    MOST_DRAFTED,
    PEER_MODES,
    KVTypes,
    kv_types,
)

FIRST_STOP = 512
"""Shortest context that the slider offers, in tokens."""
MAX_STATES = 1 << 20
"""Most host memory for kept states that can be chosen, in MiB."""
CONTEXT_IF_UNKNOWN = 32768
"""Longest context that is offered for models that do not name theirs, in tokens."""
KV_HINTS = {
    "f32": tr_later("Exact, twice as large as F16"), "f16": tr_later("Half of F32"),
    "bf16": tr_later("Half of F32, less exact"), "q8_0": tr_later("About half of F16"),
    "q4_0": tr_later("About a quarter of F16"),
}  # fmt: skip

SAME_HINT = tr_later("Keys and values have the type chosen as KV cache")

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


ROPE_NAMES = {
    "": tr_later("As the file says"), "none": tr_later("None"), "linear": tr_later("Linear"),
    "yarn": tr_later("YaRN"),
}  # fmt: skip
ROPE_HINTS = {
    "": tr_later("Positions are stretched as the model's file says"),
    "none": tr_later("Positions are not stretched, whatever the file says"),
    "linear": tr_later("All positions are stretched alike; costs some accuracy"),
    "yarn": tr_later("Only slow rotations are stretched, which is more exact"),
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


def _kv_entries() -> list[tuple[str, str, str]]:
    """Return the entries of a combo box for the type of keys or of values."""
    return [(kind, kind.upper(), KV_HINTS.get(kind, "")) for kind in KV_TYPES]


def _choices(entries: Sequence[tuple[str, str, str]]) -> QComboBox:
    """Return a combo box of entries (value, text, tooltip)."""
    box = QComboBox()
    for value, text, tip in entries:
        box.addItem(tr(text), value)
        box.setItemData(box.count() - 1, plain_tip(tr(tip)), Qt.ItemDataRole.ToolTipRole)
    return box


class RareOptions(QWidget):
    """Fields that few people need, below a heading that opens and closes them.

    Attributes:
        head: button that opens and closes the fields.
    """

    type_v_changed = Signal()
    parallel_changed = Signal(int)
    states_changed = Signal(object)  # bytes, or None for the engine's choice
    batch_changed = Signal(object)  # int, or None for the engine's choice
    speed_changed = Signal(bool)
    draft_changed = Signal(int)
    draft_vocab_changed = Signal(int)  # 0 for all tokens
    rope_changed = Signal(str, float, float)  # scaling, factor, base
    template_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setText(tr("Requests, batch, pictures, RoPE, template"))
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        same = ("", tr_later("Same as keys"), SAME_HINT)
        self.type_v = _choices([same, *_kv_entries()])
        self.parallel = QSpinBox(minimum=1, maximum=MAX_PARALLEL)
        self.states = QSpinBox(minimum=-1, maximum=MAX_STATES, singleStep=512, suffix=" MiB")
        self.batch = QSpinBox(minimum=0, maximum=MAX_BATCH, singleStep=128)
        self.fast_prompts = QCheckBox()
        self.draft = QSpinBox(minimum=0, maximum=MOST_DRAFTED)
        self.draft_vocab = QSpinBox(minimum=0, maximum=MAX_DRAFT_VOCAB, singleStep=4096)
        sources = [(tr("No model"), ""), (tr("MTP block"), OWN_BLOCK)]
        self.draft_model = GgufField(tr("Draft model"), sources)
        words = [(tr("auto"), "auto"), (tr("Off"), "off")]
        self.mmproj = GgufField(tr("Encoder of pictures (mmproj)"), words)
        self.encoder = EncoderDeviceField()
        kinds = [(kind, name, ROPE_HINTS[kind]) for kind, name in ROPE_NAMES.items()]
        self.rope = _choices(kinds)
        self.factor = QDoubleSpinBox(maximum=MAX_ROPE_FACTOR, decimals=2, singleStep=1.0)
        self.base = QDoubleSpinBox(maximum=MAX_ROPE_BASE, decimals=0, singleStep=10_000.0)
        self.template = button("")
        self.template.clicked.connect(self.template_requested)
        self._body = QWidget()
        self._build()
        self.type_v.currentIndexChanged.connect(lambda _: self.type_v_changed.emit())
        self.parallel.valueChanged.connect(self.parallel_changed)
        self.states.valueChanged.connect(
            lambda n: self.states_changed.emit(None if n < 0 else n * MIB)
        )
        self.batch.valueChanged.connect(lambda n: self.batch_changed.emit(n or None))
        self.fast_prompts.toggled.connect(self.speed_changed)
        self.draft.valueChanged.connect(self.draft_changed)
        self.draft_vocab.valueChanged.connect(
            lambda n: self.draft_vocab_changed.emit(max(n, LEAST_DRAFT_VOCAB) if n else 0)
        )
        self.rope.currentIndexChanged.connect(self._report_rope)
        for field in (self.factor, self.base):
            field.valueChanged.connect(self._report_rope)
        self.head.toggled.connect(self._on_toggled)
        theme_signals().changed.connect(self._refresh)
        self._on_toggled(False)

    def set_settings(self, settings: SplitSettings) -> None:
        """Show settings, and all fields if one of them is set."""
        show_number(self.parallel, settings.parallel)
        kept = settings.checkpoint_bytes
        show_number(self.states, -1 if kept is None else kept // MIB)
        show_number(self.batch, settings.n_batch or 0)
        show_number(self.draft, settings.n_draft)
        show_number(self.draft_vocab, settings.draft_vocab)
        self.draft_model.set_value(settings.draft_path)
        self.mmproj.set_value(settings.mmproj)
        self.encoder.set_devices(settings.encoder_devices, settings.encoder_device)
        self.encoder.setEnabled(settings.mmproj != "off")
        show_number(self.factor, settings.rope_factor)
        show_number(self.base, settings.rope_base)
        k, v = kv_types(settings.kv_type)
        with (
            QSignalBlocker(self.rope), QSignalBlocker(self.type_v),
            QSignalBlocker(self.fast_prompts),
        ):  # fmt: skip
            self.fast_prompts.setChecked(settings.fast_prompts)
            self.rope.setCurrentIndex(self.rope.findData(settings.rope_scaling))
            self.type_v.setCurrentIndex(self.type_v.findData("" if v == k else v))
        has_own = bool(settings.chat_template)
        self.template.setText(tr("Own…") if has_own else tr("From the file…"))
        is_set = v != k or settings.n_batch or settings.rope_scaling or settings.rope_factor
        is_set = is_set or settings.parallel > 1 or kept is not None
        is_set = is_set or settings.n_draft != DEFAULT_DRAFTED or settings.draft_path
        is_set = is_set or settings.mmproj != "auto" or settings.encoder_device != "auto"
        is_set = is_set or settings.draft_vocab
        if is_set or settings.rope_base or settings.fast_prompts or has_own:
            self.head.setChecked(True)

    def _report_rope(self) -> None:
        factor, base = (0.0 if f.value() < 1 else f.value() for f in (self.factor, self.base))
        self.rope_changed.emit(self.rope.currentData(), factor, base)

    def _on_toggled(self, is_open: bool) -> None:
        self._body.setVisible(is_open)
        self._refresh()

    def _refresh(self) -> None:
        name = "chevron-up" if self.head.isChecked() else "chevron-down"
        self.head.setIcon(icon(name, theme().muted))

    def _rows(self) -> tuple[tuple[str, QWidget, str], ...]:
        """Return name, field and tooltip of each row."""
        return (
            (
                tr("Requests at once"),
                self.parallel,
                tr(
                    "How many requests of the whole context length have room at once; up to 16 "
                    "shorter ones share it"
                ),
            ),
            (
                tr("Kept states"),
                self.states,
                tr(
                    "Most host memory for states of recurrent layers that are kept, so that chats "
                    "go on where they ended; 0 keeps none"
                ),
            ),
            (
                tr("Values in KV cache"),
                self.type_v,
                tr("Number type of values where keys have another one"),
            ),
            (tr("Batch"), self.batch, tr("Prompt tokens that are computed at once")),
            (
                tr("Faster prompts"),
                self.fast_prompts,
                tr(
                    "Faster prompts on processors with BF16 units; answers may then differ in "
                    "their last digits depending on what else runs"
                ),
            ),
            (
                tr("Guessed tokens"),
                self.draft,
                tr(
                    "How many tokens are guessed and checked at once: from the text so far, and by "
                    "the model's own block for that (MTP) if its file has one. Answers stay the "
                    "same, and text that repeats comes faster. 0 guesses none"
                ),
            ),
            (
                tr("Draft model"),
                self.draft_model,
                tr(
                    "A smaller model with the same vocabulary, which guesses tokens; or the "
                    "model's own block for that, which GPUs load only if it is chosen here"
                ),
            ),
            (
                tr("Guess from"),
                self.draft_vocab,
                tr(
                    "How many tokens, the most frequent ones, the model's own block for guesses "
                    "(MTP) chooses from; it then reads less for each guess. Answers stay the same"
                ),
            ),
            *self._rows_of_model(),
        )

    def _rows_of_model(self) -> tuple[tuple[str, QWidget, str], ...]:
        """Return the rows of what differs from model to model."""
        return (
            (
                tr("Pictures"),
                self.mmproj,
                tr(
                    "The file, called mmproj, with which a model sees pictures: one beside it, or "
                    "another that was published with the model"
                ),
            ),
            (
                tr("Encode pictures on"),
                self.encoder,
                tr(
                    "The device whose memory holds the mmproj file and which encodes pictures. By "
                    "itself, Tandem takes the GPU with the largest share if there is room, else "
                    "the CPU"
                ),
            ),
            (tr("RoPE scaling"), self.rope, tr("How positions are stretched to a longer context")),
            (tr("RoPE factor"), self.factor, tr("How many times longer the context becomes")),
            (tr("RoPE base"), self.base, tr("Base of the rotations' frequencies")),
            (tr("Chat template"), self.template, tr("How messages become the model's prompt")),
        )

    def _build(self) -> None:
        grid = QGridLayout(self._body)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(8)
        grid.setColumnStretch(0, 1)
        for row, (title, field, tip) in enumerate(self._rows()):
            caption = label(title, "muted")
            caption.setBuddy(field)
            field.setAccessibleName(title)
            field.setAccessibleDescription(tip)
            scaled(field, field.setFixedWidth, 150)
            set_tip(field, tip)
            ignore_wheel(field)
            grid.addWidget(caption, row, 0)
            grid.addWidget(field, row, 1)
        self.batch.setSpecialValueText(tr("auto"))
        self.states.setSpecialValueText(tr("auto"))
        self.draft_vocab.setSpecialValueText(tr("all tokens"))
        self.draft_vocab.setSuffix(tr(" tokens"))
        whole = self.parallel, self.states, self.batch, self.draft_vocab
        for number in (*whole, self.factor, self.base):
            number.setKeyboardTracking(False)
        for number in (self.factor, self.base):
            number.setSpecialValueText(tr("As the file says"))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.head)
        layout.addWidget(self._body)


class LoadOptions(QWidget):
    """Fields for the settings other than shares.

    Attributes:
        rare: fields that few people need.
    """

    context_changed = Signal(int)
    kv_type_changed = Signal(str)
    threads_changed = Signal(object)  # int, or None for one per core
    p2p_changed = Signal(str)
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
        self.context.setAccessibleName(tr("Context length in tokens"))
        self.context.setKeyboardTracking(False)
        scaled(self.context, self.context.setFixedWidth, 96)
        self.kv_type = _choices(_kv_entries())
        self.kv_type.setAccessibleName(tr("KV cache type"))
        self.p2p = _choices([(mode, PEER_NAMES[mode], PEER_HINTS[mode]) for mode in PEER_MODES])
        self.p2p.setAccessibleName(tr("GPU-to-GPU transfers"))
        self.p2p_label = label(tr("GPU to GPU"), "muted")
        self.threads = QSpinBox()
        self.threads.setAccessibleName(tr("CPU threads"))
        self.threads.setRange(0, MAX_THREADS)
        self.threads.setSpecialValueText(tr("auto"))
        self.threads.setKeyboardTracking(False)
        scaled(self.threads, self.threads.setFixedWidth, 96)
        self.rare = RareOptions()
        self.threads_label = label(tr("Threads"), "muted")
        for field in (self.context_slider, self.context, self.kv_type, self.threads, self.p2p):
            ignore_wheel(field)
        self._build()
        self.context_slider.valueChanged.connect(self._on_slider)
        self.context_slider.sliderPressed.connect(self.gesture_began)
        self.context_slider.sliderReleased.connect(self.gesture_ended)
        self.context.valueChanged.connect(self.context_changed)
        self.kv_type.currentIndexChanged.connect(self._report_kv_type)
        self.rare.type_v_changed.connect(self._report_kv_type)
        self.p2p.currentIndexChanged.connect(
            lambda _: self.p2p_changed.emit(self.p2p.currentData())
        )
        self.threads.valueChanged.connect(lambda n: self.threads_changed.emit(n or None))
        self.set_model_context(0)

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
        show_number(self.threads, settings.cpu_threads or 0)
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
        self.kv_type_changed.emit(str(KVTypes(k, self.rare.type_v.currentData() or k)))

    def _on_slider(self, stop: int) -> None:
        self.context_changed.emit(self._stops[stop])

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
        layout.addWidget(label(tr("KV cache"), "muted"), 2, 0)
        layout.addWidget(self.kv_type, 2, 1)
        layout.addWidget(self.threads_label, 2, 2, Qt.AlignmentFlag.AlignRight)
        layout.addWidget(self.threads, 2, 3)
        layout.addWidget(self.p2p_label, 3, 0)
        layout.addWidget(self.p2p, 3, 1, 1, 3)
        layout.addWidget(self.rare, 4, 0, 1, 4)
