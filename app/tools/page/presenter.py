"""Connects the dialog of tool servers, and the form for one, with the session."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QMessageBox, QWidget

from app.core.translation import tr
from app.tools.page.server_form import ADDRESS, JSON, ServerForm
from app.tools.page.session import ToolSession
from app.tools.page.tool_dialog import ToolDialog
from app.tools.server_store import ToolServer, checked_server, servers_in, split_command
from app.widgets.text import plain_tip
from engine import EngineError


class ToolPresenter(QObject):
    """The dialogs while they are open.

    Args:
        over: parent of the dialogs.
    """

    def __init__(self, session: ToolSession, over: QWidget, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._over = session, over
        self.dialog: ToolDialog | None = None
        self.form: ServerForm | None = None
        self._edited: ToolServer | None = None
        session.changed.connect(self._refresh)

    @Slot()
    def open(self) -> None:
        """Show the dialog."""
        self._session.begin()
        if self.dialog is not None:
            self.dialog.raise_()
            return
        session = self._session
        dialog = self.dialog = ToolDialog(self._over)
        dialog.switched.connect(session.switch)
        dialog.tool_switched.connect(session.show_tool)
        dialog.restart_requested.connect(session.restart)
        dialog.add_requested.connect(lambda: self._ask(None))
        dialog.edit_requested.connect(lambda name: self._ask(self._server(name)))
        dialog.remove_requested.connect(self._remove)
        dialog.finished.connect(self._on_closed)
        self._refresh()
        dialog.open()

    def _server(self, name: str) -> ToolServer:
        return next(server for server in self._session.servers if server.name == name)

    @Slot()
    def _refresh(self) -> None:
        if self.dialog is not None:
            self.dialog.show_states(self._session.states)

    def _ask(self, server: ToolServer | None) -> None:
        """Open the form for a server; None for a new one."""
        self._edited = server
        form = self.form = ServerForm(server, self.dialog)
        form.submitted.connect(self._submit)
        form.finished.connect(self._on_form_closed)
        form.open()

    @Slot()
    def _submit(self) -> None:
        """Take what the form says, or say why it will not do."""
        form, edited = self.form, self._edited
        assert form is not None, "it has sent the signal"
        try:
            if form.tabs.currentIndex() == JSON:
                self._session.add(servers_in(form.json.toPlainText()))
            else:
                server = self._typed(form, edited)
                self._session.put(server, edited.name if edited else "")
        except EngineError as error:
            form.show_problem(f"{error.message} {error.hint}".strip())
            return
        form.accept()

    def _typed(self, form: ServerForm, edited: ToolServer | None) -> ToolServer:
        """Return the server that the form describes.

        Raises:
            EngineError: it describes none, or one whose name another has.
        """
        name = form.name.text().strip()
        taken = {server.name for server in self._session.servers}
        if edited is not None:
            taken.discard(edited.name)
        if name in taken:
            raise EngineError(tr("Another server has the name {name}.").format(name=name))
        server = replace(edited, name=name) if edited is not None else ToolServer(name)
        if form.tabs.currentIndex() == ADDRESS:
            headers = _pairs(form.headers.toPlainText(), ":")
            url = form.url.text().strip()
            found = replace(server, command=(), environment={}, folder="", url=url, headers=headers)
        else:
            found = replace(
                server,
                command=split_command(form.command.text()),
                environment=_pairs(form.variables.toPlainText(), "="),
                folder=form.folder.text().strip(),
                url="",
                headers={},
            )
        return checked_server(found)

    @Slot(str)
    def _remove(self, name: str) -> None:
        text = tr("Remove {name}? What is typed for it is forgotten.").format(name=name)
        question = QMessageBox.question(self.dialog, tr("Remove the tool server"), plain_tip(text))
        if question is QMessageBox.StandardButton.Yes:
            self._session.remove(name)

    @Slot()
    def _on_form_closed(self) -> None:
        form, self.form = self.form, None
        if form is not None:
            form.headers.clear()  # they may be secrets
            form.deleteLater()

    @Slot()
    def _on_closed(self) -> None:
        dialog, self.dialog = self.dialog, None
        if dialog is not None:
            dialog.deleteLater()


def _pairs(text: str, between: str) -> dict[str, str]:
    """Return the names and values of lines such as "NAME=value".

    Raises:
        EngineError: a line has no such form.
    """
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, mark, value = line.partition(between)
        if not mark or not name.strip():
            sentence = tr("“{line}” is not of the form {form}.")
            form = f"NAME{between}VALUE"
            raise EngineError(sentence.format(line=line[:40], form=form))
        found[name.strip()] = value.strip()
    return found
