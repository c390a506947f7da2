"""Options of a load that few people need: requests, batch, drafts, pictures, RoPE, template."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QDoubleSpinBox,
    QGridLayout,
    QHBoxLayout,
    QPlainTextEdit,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.core.units import MIB
from app.devices.split.settings import (
    MAX_BATCH,
    MAX_DRAFT_VOCAB,
    MAX_PARALLEL,
    MAX_ROPE_BASE,
    MAX_ROPE_FACTOR,
    OWN_BLOCK,
    SplitSettings,
)
from app.devices.split.template_preview import TemplatePreview
from app.devices.split.views.choice_fields import (
    EncoderDeviceField,
    GgufField,
    choice_box,
    kv_type_entries,
)
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.layout import scaled
from app.widgets.text import label, set_tip
from app.widgets.theme import icon, set_role, theme, theme_signals
from engine import DEFAULT_DRAFTED, LEAST_DRAFT_VOCAB, MOST_DRAFTED, kv_types

MAX_STATES = 1 << 20
"""Most host memory for kept states that can be chosen, in MiB."""

SAME_HINT = tr_later("Keys and values have the type chosen as KV cache")

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
        self.type_v = choice_box([same, *kv_type_entries()])
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
        self.rope = choice_box(kinds)
        self.factor = QDoubleSpinBox(maximum=MAX_ROPE_FACTOR, decimals=2, singleStep=1.0)
        self.base = QDoubleSpinBox(maximum=MAX_ROPE_BASE, decimals=0, singleStep=10_000.0)
        self.template = button("")
        self.template.clicked.connect(self.template_requested)
        self._body = QWidget()
        self._build()
        self._connect()
        self._on_toggled(False)

    def _connect(self) -> None:
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

    @Slot(bool)
    def offer_block(self, is_there: bool) -> None:
        """Let the model's own block for guesses be chosen, or say why it cannot."""
        why = tr("This model's file has no MTP block, and none is beside it.")
        self.draft_model.refuse({} if is_there else {OWN_BLOCK: why})

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
            *self._rows_of_guesses(),
            *self._rows_of_model(),
        )

    def _rows_of_guesses(self) -> tuple[tuple[str, QWidget, str], ...]:
        """Return the rows of what guesses tokens, and how many."""
        return (
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
        )

    def _rows_of_model(self) -> tuple[tuple[str, QWidget, str], ...]:
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


TYPED_MS = 400
"""Milliseconds after the last key until a template is rendered."""


class TemplateDialog(QDialog):
    """Editor of a template's source above the prompt that it makes.

    Attributes:
        source: editor of the source.
        preview: the prompt, or why there is none.
        use: button that takes the template.
        reset: button that takes the file's template again.
    """

    typed = Signal(str)  # source, a moment after the last key
    chosen = Signal(str)  # source; "" for the file's

    def __init__(self, parent: QWidget, source: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Chat template"))
        self.resize(720, 640)
        self._own, self._of_the_file = source, ""
        self.source, self.preview = QPlainTextEdit(), QPlainTextEdit()
        self.use = button(tr("Use this template"), "primary")
        self.reset = button(tr("Use the file's"))
        self._note = label(tr("The prompt of a short conversation"), "muted")
        self._timer = QTimer(self, singleShot=True, interval=TYPED_MS)
        self._timer.timeout.connect(self.flush)
        self._build()
        self.source.textChanged.connect(self._timer.start)
        self.use.clicked.connect(self._on_use)
        self.reset.clicked.connect(self._on_reset)

    @Slot()
    def flush(self) -> None:
        """Ask for the preview of what is typed now."""
        self._timer.stop()
        self.typed.emit(self.source.toPlainText())

    @Slot(object)
    def show_preview(self, made: TemplatePreview) -> None:
        """Show what a template makes; the first one also brings the file's source."""
        if not self.source.toPlainText():
            self._of_the_file = made.source
            with QSignalBlocker(self.source):
                self.source.setPlainText(made.source)
        self.preview.setPlainText(made.problem or made.text)
        self._note.setText((made.problem and tr("This template does not work:")) or self._caption())
        set_role(self._note, "warn" if made.problem else "muted")
        self.use.setEnabled(not made.problem)

    def _caption(self) -> str:
        return tr("The prompt of a short conversation")

    @Slot()
    def _on_use(self) -> None:
        text = self.source.toPlainText()
        self.chosen.emit("" if text == self._of_the_file else text)
        self.accept()

    @Slot()
    def _on_reset(self) -> None:
        self.chosen.emit("")
        self.accept()

    def _build(self) -> None:
        font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
        for edit, name in ((self.source, tr("Template source")), (self.preview, tr("Prompt"))):
            edit.setFont(font)
            edit.setAccessibleName(name)
            edit.setTabChangesFocus(True)
        self.preview.setReadOnly(True)
        self.source.setPlainText(self._own)
        cancel = button(tr("Cancel"))
        cancel.clicked.connect(self.reject)
        row = QHBoxLayout()
        row.addWidget(self.reset)
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(self.use)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 16, 16, 16)
        layout.setSpacing(8)
        layout.addWidget(label(tr("Template (Jinja)"), "heading"))
        layout.addWidget(self.source, 3)
        layout.addWidget(self._note)
        layout.addWidget(self.preview, 2)
        layout.addLayout(row)
