"""The model bar above the chat, and the start page that replaces an empty chat."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, QSize, Qt, Signal, Slot
from PySide6.QtGui import QAction, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QMenu,
    QProgressBar,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import context_text, decimal_size
from app.devices.split.views.split_footer import named
from app.remote.client.address import is_remote, model_caption, split_path
from app.widgets.buttons import Chip, button
from app.widgets.controls import Sheet, line
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.text import PlainLabel, caption_text, label, set_tip
from app.widgets.theme import icon, mix, px, set_role, theme, theme_signals
from engine import Fallback, LoadParams, ModelInfo, ModelLoaded, one_line

TEXT, SHORT = tr_later("Slower than possible"), tr_later("Slower")
"""The chip's texts in wide and narrow windows."""


class SlowerChip(Chip):
    """Chip shown while a GPU uses a slower fallback; a click shows the reasons."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._fallbacks: tuple[Fallback, ...] = ()
        self.reasons = _Reasons(tr(TEXT), self)
        self.clicked.connect(self._open)
        theme_signals().changed.connect(self.refresh)
        self.refresh()

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show these reasons; hide the chip if there are none."""
        if tuple(fallbacks) == self._fallbacks:
            return
        self._fallbacks = tuple(fallbacks)
        self.reasons.set_fallbacks(self._fallbacks)
        titles = "\n".join(named(translated(fallback.title)) for fallback in self._fallbacks)
        set_tip(self, tr("{titles}\nClick for the reasons").format(titles=titles))
        self.setAccessibleDescription(
            " ".join(named(translated(f.sentence)) for f in self._fallbacks)
        )
        if not self._fallbacks:
            self.reasons.hide()
        self.set_texts((tr(TEXT), tr(SHORT)) if self._fallbacks else ())

    @Slot()
    def refresh(self) -> None:
        colours = theme()
        self.setStyleSheet(
            f"QPushButton {{ color: {colours.warn};"
            f" border-color: {mix(colours.line, colours.warn, 0.5)}; }}"
            f"QPushButton:focus {{ border-color: {colours.accent}; }}"
        )

    @Slot()
    def _open(self) -> None:
        self.reasons.show_below(self)


class _Reasons(Sheet):
    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        while (item := self.column.takeAt(0)) is not None:
            if (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        for number, fallback in enumerate(fallbacks):
            if number:
                self.column.addSpacing(8)
                self.column.addWidget(line())
                self.column.addSpacing(8)
            why = translated(fallback.why)
            self._add(translated(fallback.title), "heading")
            self._add(f"{why[:1].upper()}{why[1:]}.")
            self._add(f"{translated(fallback.cost)} {translated(fallback.help)}", "muted")
        self.column.addStretch()
        if self.isVisible():
            self.fit()

    def _add(self, text: str, role: str | None = None) -> None:
        made = label(named(text), role)
        made.setWordWrap(True)
        made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.column.addWidget(made)


HEIGHT, MARGINS, SPACING = 52, 44, 8
NAME_WIDTH, GOOD_NAME_WIDTH, MIN_NAME_WIDTH = 420, 150, 96
"""Widths of the model's name: maximum, minimum before chips are shortened, absolute minimum."""
PROGRESS_WIDTH = 180


class ModelBar(QFrame):
    """Bar with the selected model, its load progress, or the loaded model."""

    open_requested = Signal()
    demo_requested = Signal()
    remote_requested = Signal()
    recent_chosen = Signal(str)
    load_requested = Signal()
    cancel_requested = Signal()
    eject_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("modelBar")
        scaled(self, self.setFixedHeight, HEIGHT)
        self._full_name = ""
        self._name = QToolButton(self, popupMode=QToolButton.ToolButtonPopupMode.InstantPopup)
        self.menu = _Menu(self._name, self)
        self._name.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self._name.setLayoutDirection(Qt.LayoutDirection.RightToLeft)  # the chevron comes last
        self._name.setIconSize(QSize(14, 14))
        self._name.setStyleSheet("font-weight: 600;")
        self._name.setMenu(self.menu)
        made = (label(role="pill") for _ in range(4))
        self._size, self._loaded, self.vision, self._context = made
        self.slower = SlowerChip(self)
        self._chips: list[Chip] = []  # shown even if the bar is narrow; the most important last
        self._progress = QProgressBar(self, minimum=0, maximum=1000, textVisible=False)
        self._progress.setAccessibleName(tr("Loading"))
        scaled(self, self._progress.setFixedWidth, PROGRESS_WIDTH)
        self._percent = label(role="muted")
        self._button = button("")
        self._button.clicked.connect(self._press)
        self._on_press = self.load_requested
        self._n_pills = 0
        self._row = fill(QHBoxLayout(self), margins=(12, 0, 16, 0), spacing=SPACING)
        pills = (self._size, self._context, self._loaded, self.vision, self.slower)
        for widget in (self._name, *pills, self._progress):
            self._row.addWidget(widget, 0, Qt.AlignmentFlag.AlignVCenter)
        fill(self._row, self._percent, None, self._button)
        self._follow(self.slower)
        theme_signals().changed.connect(self.refresh)
        self.set_menu((), has_demo=False)
        self.show_empty()
        self.refresh()

    def add_chip(self, chip: Chip) -> None:
        """Add a chip before the button."""
        self._row.insertWidget(self._row.count() - 1, chip)
        self._follow(chip)

    def _follow(self, chip: Chip) -> None:
        self._chips.append(chip)
        chip.changed.connect(self._fit)
        self._fit()

    def set_menu(self, recent: tuple[str, ...], *, has_demo: bool) -> None:
        """Fill the menu of models to open."""
        self.menu.clear()
        opened = self.menu.addAction(tr("Open model…\tCtrl+O"))  # the window handles the key
        opened.triggered.connect(self.open_requested)
        if has_demo:
            demo = self.menu.addAction(tr("Demo model"))
            demo.triggered.connect(self.demo_requested)
        remote = self.menu.addAction(tr("Remote model…"))
        set_tip(remote, tr("A model on another machine"))
        remote.triggered.connect(self.remote_requested)
        if recent:
            self.menu.addSeparator()
            title = self.menu.addAction(tr("Recent"))  # style sheets hide section titles
            title.setEnabled(False)
        for path in recent:
            action = self.menu.addAction(caption_text(model_caption(path)))
            set_tip(action, path)
            action.setData(path)
            action.triggered.connect(self._choose_recent)
        self.menu.setToolTipsVisible(True)

    def show_empty(self) -> None:
        """Show that no model is selected."""
        self._set_name(tr("Select a model"))
        self._show(pills=0, button_text="")

    def show_selected(self, info: ModelInfo) -> None:
        """Show a selected model that can be loaded."""
        self._set_info(info)
        self._show(pills=1, button_text=tr("Connect") if is_remote(info.path) else tr("Load"))
        self._on_press = self.load_requested
        set_role(self._button, "primary")

    def show_loading(self, info: ModelInfo) -> None:
        self._set_info(info)
        self.set_progress(0.0)
        self._show(pills=0, button_text=tr("Cancel"), is_loading=True)
        self._on_press = self.cancel_requested
        set_role(self._button, "")

    def set_progress(self, share: float) -> None:
        self._progress.setValue(round(share * 1000))
        self._percent.setText(f"{share:.0%}".replace("%", " %"))

    def set_doing(self, text: str) -> None:
        """Show the current loading step; "" keeps the percentage."""
        if text:
            self._percent.setText(text)

    def show_loaded(self, loaded: ModelLoaded) -> None:
        """Show the loaded model."""
        self._set_info(loaded.info)
        self._set_vision(loaded)
        if is_remote(loaded.info.path):
            self._show_connected(loaded)
            return
        context, kv_type = context_text(loaded.n_ctx), loaded.params.kv_type
        text = tr("{context} context · KV {kv_type}")
        self._context.setText(text.format(context=context, kv_type=kv_type))
        n_batch = min(loaded.n_batch, loaded.n_ctx)
        tip = tr("Prompts are processed {n} tokens at a time").format(n=n_batch)
        set_tip(self._context, tip * bool(n_batch))
        self._set_loaded_text(loaded.params)
        self._show(pills=3, button_text=tr("Eject"))
        self.set_fallbacks(loaded.fallbacks)
        self._on_press = self.eject_requested
        set_role(self._button, "")

    def _show_connected(self, loaded: ModelLoaded) -> None:
        text = tr("{context} context").format(context=context_text(loaded.n_ctx))
        self._context.setText(text)
        set_tip(self._context, "")
        self._loaded.setText(tr("● connected"))
        set_tip(self._loaded, split_path(loaded.info.path).url)
        self._show(pills=3 if loaded.n_ctx else 2, button_text=tr("Disconnect"))
        self._on_press = self.eject_requested
        set_role(self._button, "")

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show the loaded model's fallbacks."""
        self.slower.set_fallbacks(fallbacks)

    @Slot()
    def refresh(self) -> None:
        self._name.setIcon(icon("chevron-down", theme().muted))
        self.setStyleSheet(
            f"#modelBar {{ background: {theme().surface}; border: none;"
            f" border-bottom: 1px solid {theme().line}; }}"
        )
        self._loaded.setStyleSheet(f"color: {theme().ok};")

    def _set_name(self, name: str) -> None:
        self._full_name = one_line(name)
        set_tip(self._name, name)
        self._name.setAccessibleName(tr("Model: {name}").format(name=self._full_name))

    def _set_info(self, info: ModelInfo) -> None:
        self._set_name(info.name)
        if is_remote(info.path):
            self._size.setText(tr("remote"))
            return
        self._size.setText(f"{info.quant} · {decimal_size(info.n_bytes)}")

    def _set_loaded_text(self, params: LoadParams) -> None:
        n = len(params.devices)
        self._loaded.setText(tr_n("● loaded on {n} device", "● loaded on {n} devices", n))
        set_tip(self._loaded, ", ".join(params.devices))

    def _set_vision(self, loaded: ModelLoaded) -> None:
        vision = loaded.vision
        self.vision.setText("" if vision is None else tr("vision"))
        file = "" if vision is None else vision.mmproj
        set_tip(self.vision, file and tr("With {file}").format(file=file))

    def _show(self, *, pills: int, button_text: str, is_loading: bool = False) -> None:
        self._n_pills = pills
        self.slower.set_fallbacks(())
        self._progress.setVisible(is_loading)
        self._percent.setVisible(is_loading)
        self._button.setText(button_text)
        self._button.setVisible(bool(button_text))
        self._fit()

    @Slot()
    def _fit(self) -> None:
        """Distribute the width in this order: button, progress, chips, name, pills."""
        left = self.width() - MARGINS
        if not self._button.isHidden():
            left -= self._button.sizeHint().width()
        if not self._progress.isHidden():
            self._progress.setFixedWidth(min(px(PROGRESS_WIDTH), self.width() // 4))
            self._percent.setFixedWidth(self._percent.fontMetrics().horizontalAdvance("100 %") + 2)
            left -= self._progress.width() + self._percent.width() + 2 * SPACING
        self._fit_name(left)
        wanted = [chip for chip in self._chips if chip.is_wanted]
        for at, chip in enumerate(wanted, 1):
            others = sum(other.least_width + SPACING for other in wanted[at:])
            name = min(self._name.sizeHint().width(), px(GOOD_NAME_WIDTH))
            chip.fit(left - name - others - 2 * SPACING)
            left -= chip.sizeHint().width() + SPACING
            self._fit_name(left)
        self._fit_pills(left - self._name.sizeHint().width())
        for chip in self._chips:  # last, once there is room for them
            chip.setVisible(chip.is_wanted)

    def _fit_name(self, left: int) -> None:
        width, metrics = min(NAME_WIDTH, max(MIN_NAME_WIDTH, left)), self._name.fontMetrics()
        self._name.setText(caption_text(self._full_name, 0))
        frame = self._name.sizeHint().width() - metrics.horizontalAdvance(self._full_name)
        elide = Qt.TextElideMode.ElideMiddle
        shown = metrics.elidedText(self._full_name, elide, width - frame)
        self._name.setText(caption_text(shown, 0))

    def _fit_pills(self, left: int) -> None:
        pills = (self._size, self._loaded, self._context)
        wanted = [*pills[: self._n_pills], *[self.vision] * (self._n_pills > 1)]
        for pill in (self._size, self._loaded, self.vision, self._context):
            if pill not in wanted or not pill.text():
                pill.hide()
                continue
            left -= pill.sizeHint().width() + SPACING
            pill.setVisible(left >= 0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    @Slot()
    def _choose_recent(self) -> None:
        action = self.sender()
        if isinstance(action, QAction):
            self.recent_chosen.emit(str(action.data()))

    @Slot()
    def _press(self) -> None:
        self._on_press.emit()


class _Menu(QMenu):
    """Left-to-right menu below a right-to-left button."""

    def __init__(self, owner: QToolButton, parent: QWidget) -> None:
        super().__init__(parent)
        self._owner = owner
        self.setLayoutDirection(Qt.LayoutDirection.LeftToRight)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.move(self._owner.mapToGlobal(QPoint(0, self._owner.height())))


N_RECENT = 4
WIDTH = 320
PADDING = 32  # padding of button text, in pixels


class StartView(QWidget):
    """Page that offers models to open, or shows that one is loading or ready."""

    open_requested = Signal()
    download_requested = Signal()
    demo_requested = Signal()
    recent_chosen = Signal(str)
    prompt_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._title = _centred("", "title")
        self._text = _centred("", "muted")
        self._open = button(tr("Open model…"))
        self._open.clicked.connect(self.open_requested)
        self._download = button(tr("Download a model…"), "primary")
        self._download.clicked.connect(self.download_requested)
        self._demo = button(tr("Try the demo model"))
        self._demo.clicked.connect(self.demo_requested)
        self._recent_title = _centred(tr("Recent"), "muted")
        self._recent = fill(QVBoxLayout(), spacing=2)
        self._prompts = fill(QVBoxLayout(), spacing=6)
        self._buttons = [self._download, self._open, self._demo]
        layout = fill(self._make_page(), (None, 2), self._title, self._text, 16, spacing=8)
        for widget in self._buttons:
            scaled(widget, widget.setFixedWidth, WIDTH)
            layout.addWidget(widget, 0, Qt.AlignmentFlag.AlignHCenter)
        fill(layout, 12, self._recent_title, self._recent, self._prompts, (None, 3))
        self.show_state("", recent=(), has_demo=False)

    def _make_page(self) -> QVBoxLayout:
        scroll, page = QScrollArea(), QWidget()
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setWidgetResizable(True)
        scroll.setWidget(page)
        fill(QVBoxLayout(self), scroll, margins=NO_MARGINS)
        return QVBoxLayout(page)

    def show_state(
        self,
        model: str,
        *,
        loading: str = "",
        recent: tuple[str, ...],
        has_demo: bool,
        prompts: tuple[str, ...] = (),
    ) -> None:
        """Show that a model is loading or ready, or offer models to open.

        Args:
            model: name of the model that is ready; "" if none is.
            loading: name of the model that is being loaded; "" if none is.
            prompts: messages that a click sends, shown in the window's language.
        """
        is_free = not (model or loading)
        title = tr("Welcome to Tandem")
        text = tr("Download or open a model, or drop a .gguf file on this window.")
        if loading:
            title = tr("Loading {model} …").format(model=loading)
            text = tr("You can already write your first message.")
        elif model:
            title, text = tr("{model} is ready").format(model=model), tr("Ask something below.")
            if prompts:
                text = tr("Ask something below.", "the demo model (English only)")
        self._title.setText(title)
        self._text.setText(text)
        self._open.setVisible(is_free)
        self._download.setVisible(is_free)
        self._demo.setVisible(is_free and has_demo)
        self._recent_title.setVisible(is_free and bool(recent))
        self._fill_recent(recent[:N_RECENT] if is_free else ())
        self._fill_prompts(prompts if model and not loading else ())

    def _fill_prompts(self, prompts: tuple[str, ...]) -> None:
        _empty(self._prompts)
        for prompt in prompts:
            shown = tr(prompt)
            made = button(shown, name=tr("Ask: {prompt}").format(prompt=shown))
            made.clicked.connect(lambda _=False, prompt=prompt: self.prompt_chosen.emit(prompt))
            scaled(made, made.setFixedWidth, WIDTH)
            self._prompts.addWidget(made, 0, Qt.AlignmentFlag.AlignHCenter)

    def _fill_recent(self, paths: tuple[str, ...]) -> None:
        _empty(self._recent)
        for path in paths:
            name = one_line(model_caption(path))
            made = button("", "quiet", tr("Open {name}").format(name=name))
            made.setText(caption_text(_cut(name, made), 0))
            set_tip(made, path)
            made.clicked.connect(lambda _=False, path=path: self.recent_chosen.emit(path))
            scaled(made, made.setMaximumWidth, WIDTH)
            self._recent.addWidget(made, 0, Qt.AlignmentFlag.AlignHCenter)


def _empty(layout: QVBoxLayout) -> None:
    while (item := layout.takeAt(0)) is not None:
        if (old := item.widget()) is not None:
            old.hide()
            old.deleteLater()


def _cut(name: str, on: QWidget) -> str:
    """Return a name elided in the middle to fit the buttons."""
    on.ensurePolished()  # sets its font
    return on.fontMetrics().elidedText(name, Qt.TextElideMode.ElideMiddle, px(WIDTH) - PADDING)


def _centred(text: str, role: str) -> PlainLabel:
    made = label(text, role)
    made.setAlignment(Qt.AlignmentFlag.AlignCenter)
    made.setWordWrap(True)
    return made
