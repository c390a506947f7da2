"""Connects the engine's part of the settings page with the session."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QMessageBox, QVBoxLayout, QWidget

from app.core.translation import tr
from app.core.units import decimal_size
from app.setup.page.session import EngineFacts, EngineSession, InstallRequest, pack_title
from app.widgets.buttons import button
from app.widgets.layout import FlowBox
from app.widgets.text import label, plain_tip, set_tip


class EnginePanel(QWidget):
    """Panel that names the engine in use, with buttons to replace it."""

    change_requested = Signal()
    update_requested = Signal()
    roll_back_requested = Signal()
    remove_requested = Signal()
    environment_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._title, self._details = label(), label(role="muted")
        self._news = label(role="ok")
        for text in (self._title, self._details, self._news):
            text.setWordWrap(True)
        self.update_engine = button(tr("Update"), "primary")
        self.change, self.remove = button(tr("Change…")), button(tr("Remove…"))
        self.roll_back = button(tr("Go back"))
        self.environment = button(tr("Use an existing Python environment…"))
        self._controls = {
            self.update_engine: self.update_requested,
            self.change: self.change_requested,
            self.roll_back: self.roll_back_requested,
            self.environment: self.environment_requested,
            self.remove: self.remove_requested,
        }
        for control, signal in self._controls.items():
            control.clicked.connect(signal)
        self._buttons = FlowBox()
        self._buttons.set_widgets(tuple(self._controls))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 6, 0, 6)
        layout.setSpacing(6)
        for widget in (self._title, self._details, self._news, self._buttons):
            layout.addWidget(widget)
        self.show_engine("", "", "", {})

    @property
    def text(self) -> str:
        """Text of the panel about the engine."""
        lines = (self._title.text(), self._details.text(), self._news.text())
        return "\n".join(line for line in lines if line)

    def show_engine(self, title: str, details: str, news: str, tips: dict[QWidget, str]) -> None:
        """Show the engine in use.

        Args:
            news: what is newer, "" for nothing.
            tips: the buttons that make sense now, each with what it does.
        """
        for text, words in ((self._title, title), (self._details, details), (self._news, news)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setEnabled(control in tips)
            control.setAccessibleDescription(tips.get(control, ""))
            set_tip(control, tips.get(control, ""))
        self._buttons.setVisible(bool(tips))


class EngineSettings(QObject):
    """Connection of one `EngineSession` with its panel."""

    page_requested = Signal()
    install_requested = Signal(object)  # InstallRequest
    remove_requested = Signal()

    def __init__(self, session: EngineSession, panel: EnginePanel, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._panel = session, panel
        panel.change_requested.connect(self.page_requested)
        panel.update_requested.connect(self._update)
        panel.roll_back_requested.connect(session.roll_back)
        panel.remove_requested.connect(self._remove)
        panel.environment_requested.connect(self._choose_environment)
        session.known.connect(self._show)
        session.changed.connect(self._show_again)
        self._show_again()

    @Slot()
    def _show_again(self) -> None:
        if self._session.facts is not None:
            self._show(self._session.facts)

    @Slot(object)
    def _show(self, facts: EngineFacts) -> None:
        panel, pack = self._panel, facts.current
        if self._session.state == "running":
            tips: dict[QWidget, str] = {panel.change: tr("Look at it")}
            panel.show_engine(tr("An engine is being installed."), "", "", tips)
        elif facts.origin == "own":
            details = tr("It was installed together with Tandem, which uses no other one.")
            panel.show_engine(tr("PyTorch beside Tandem"), details, "", {})
        elif facts.origin == "none" or pack is None:
            tips = self._tips(panel.change, panel.environment)
            hint = tr("Models can be planned, but not loaded.")
            panel.show_engine(tr("There is no engine yet."), hint, "", tips)
        else:
            panel.show_engine(
                pack_title(pack), _where(facts), _news(facts), self._tips(*self._useful(facts))
            )

    def _useful(self, facts: EngineFacts) -> list[QWidget]:
        """Return the buttons that make sense while a pack is in use."""
        panel = self._panel
        useful: list[QWidget] = [panel.change, panel.environment, panel.remove]
        if facts.update is not None:
            useful.append(panel.update_engine)
        if facts.previous is not None and facts.previous.is_usable:
            useful.append(panel.roll_back)
        return useful

    def _tips(self, *controls: QWidget) -> dict[QWidget, str]:
        panel, facts = self._panel, self._session.facts
        previous = facts.previous if facts is not None else None
        text = tr("Use {engine} again, which is kept")
        back = text.format(engine=pack_title(previous)) if previous is not None else ""
        tips: dict[QWidget, str] = {
            panel.change: tr("Choose another engine"),
            panel.update_engine: tr("Install the newer engine; this one stays until it answers"),
            panel.roll_back: back,
            panel.environment: tr("Use the PyTorch of a Python environment that you have"),
            panel.remove: tr("Delete all engines that Tandem has installed"),
        }
        return {control: tips[control] for control in controls}

    @Slot()
    def _update(self) -> None:
        facts = self._session.facts
        if facts is not None and facts.update is not None:
            self.install_requested.emit(InstallRequest(facts.update.backend))

    @Slot()
    def _choose_environment(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._panel, tr("Folder of a Python environment"))
        if folder:
            self.install_requested.emit(InstallRequest(environment=folder))

    @Slot()
    def _remove(self) -> None:
        text = tr("Remove all engines? Models cannot be loaded until another one is installed.")
        question = QMessageBox.question(self._panel, tr("Remove the engine"), plain_tip(text))
        if question is QMessageBox.StandardButton.Yes:
            self.remove_requested.emit()


def _where(facts: EngineFacts) -> str:
    """Return where the pack in use lies, and how large it is."""
    pack = facts.current
    assert pack is not None
    if pack.is_environment:
        return pack.source
    return tr("{size} in {folder}").format(size=decimal_size(pack.n_bytes), folder=facts.folder)


def _news(facts: EngineFacts) -> str:
    """Return that this version of Tandem brings a newer engine; "" if it does not."""
    if facts.update is None:
        return ""
    text = tr("Tandem brings a newer one: PyTorch {version}, download {size}.")
    lock = facts.update.lock
    return text.format(version=lock.version, size=decimal_size(lock.n_bytes))
