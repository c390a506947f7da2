"""The start page, shown in place of an empty chat."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QScrollArea, QVBoxLayout, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.remote.client.address import model_caption
from app.widgets.buttons import button
from app.widgets.layout import scaled
from app.widgets.text import PlainLabel, caption_text, label, set_tip
from engine import one_line

N_RECENT = 4
WIDTH = 320
PADDING = 32
"""Room around the text of a button, in pixels."""


class StartView(QWidget):
    """Page that offers models to open, or says that one is loading or ready."""

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
        self._recent = QVBoxLayout()
        self._recent.setSpacing(2)
        self._prompts = QVBoxLayout()
        self._prompts.setSpacing(6)
        self._buttons = [self._download, self._open, self._demo]
        layout = self._make_page()
        layout.setSpacing(8)
        layout.addStretch(2)
        layout.addWidget(self._title)
        layout.addWidget(self._text)
        layout.addSpacing(16)
        for widget in self._buttons:
            scaled(widget, widget.setFixedWidth, WIDTH)
            layout.addWidget(widget, 0, Qt.AlignmentFlag.AlignHCenter)
        layout.addSpacing(12)
        layout.addWidget(self._recent_title)
        layout.addLayout(self._recent)
        layout.addLayout(self._prompts)
        layout.addStretch(3)
        self.show_state("", recent=(), has_demo=False)

    def _make_page(self) -> QVBoxLayout:
        """Return the layout of the page, which scrolls where the window is too low for it."""
        scroll, page = QScrollArea(), QWidget()
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setWidgetResizable(True)
        scroll.setWidget(page)
        around = QVBoxLayout(self)
        around.setContentsMargins(0, 0, 0, 0)
        around.addWidget(scroll)
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
            model: name of the model that is ready; "" for none.
            loading: name of the model that is being loaded, whatever is still ready; "" for none.
            prompts: messages to send by a click once a model is ready; shown in the window's
                language.
        """
        is_free = not (model or loading)
        title = tr("Welcome to Tandem")
        text = tr("Download or open a model, or drop a .gguf file on this window.")
        if loading:
            title = tr("Loading {model} …").format(model=loading)
            text = tr("You can write your first message meanwhile.")
        elif model:
            title, text = tr("{model} is ready").format(model=model), tr("Ask it something below.")
            if prompts:
                text = tr("Ask it something below.", "the demo model, which knows English alone")
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
    """Return a name that is not wider than the buttons, its middle left out."""
    on.ensurePolished()  # or the font is another
    return on.fontMetrics().elidedText(name, Qt.TextElideMode.ElideMiddle, px(WIDTH) - PADDING)


def _centred(text: str, role: str) -> PlainLabel:
    made = label(text, role)
    made.setAlignment(Qt.AlignmentFlag.AlignCenter)
    made.setWordWrap(True)
    return made
