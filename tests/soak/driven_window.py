"""The real window as a process that does what lines on its standard input say.

Each line is a JSON object with the name of a method of `Driver` as "do" and its arguments. What a
person would see goes to standard output at once, as lines of JSON with the time: see `Driver.note`.
The window starts the engine again however often it has died. With the environment variable
`POISONABLE` the engine's process crashes at signals, see `poisonable_engine`.
"""

from app.core.process.interruption import importing

with importing():  # as the program itself imports
    import json
    import os
    import sys
    import threading
    import time
    from dataclasses import replace
    from functools import partial
    from typing import Any

    from PySide6.QtCore import QObject, QTimer, Signal, Slot
    from PySide6.QtWidgets import QApplication

    from app import __main__ as entry
    from app import main as program
    from app.chat.message import Message
    from app.core.notice import Notice
    from app.remote.client.switch import HostSwitch
    from engine import ProcessHost, Rig, SamplingParams
    from engine.hosts.process import process_host
    from engine.util.programs import program_command
    from tests.soak.window import POISONABLE

TYPE_MS = 30
poisonable_host = partial(ProcessHost, command=program_command("tests.soak.poisonable_engine"))


class DrivenShell(program.Shell):
    """The running application with a `Driver`."""

    def __init__(self, app: QApplication, make_host: Any, rig: Rig | None = None) -> None:
        self.driver: Driver | None = None
        super().__init__(app, poisonable_host if os.environ.get(POISONABLE) else make_host, rig)
        self.driver = Driver(self)

    def start(self) -> None:
        super().start()
        assert self.driver is not None
        self.driver.start()

    @Slot(object)
    def _notify(self, notice: Notice) -> None:
        super()._notify(notice)
        if self.driver is not None:
            self.driver.note(notice=notice.text, hint=notice.hint, action=notice.action)

    def close(self) -> None:
        if self.driver is not None:
            self.driver.stop()
        super().close()


class Driver(QObject):
    """The hands and eyes of a campaign inside the window's process."""

    _came = Signal(str)

    def __init__(self, shell: DrivenShell) -> None:
        super().__init__(shell)
        self._shell, self._session, self._client = shell, shell.session, shell.client
        self._came.connect(self._do)
        self._typing = QTimer(self, interval=TYPE_MS)
        self._typing.timeout.connect(self._type)
        client = self._client
        client.ready.connect(lambda _: self.note(ready=True))
        client.state_changed.connect(lambda state: self.note(state=state.value))
        client.prefill.connect(lambda done, total, _: self.note(read=done, of=total))
        client.loaded.connect(lambda found: self.note(loaded=found.info.path))
        client.resplit_done.connect(lambda done: self.note(resplit=len(done.model.params.devices)))
        client.finished.connect(lambda finished, _: self.note(finished=finished.reason))
        client.state_saved.connect(lambda saved: self.note(state_saved=saved.n_bytes))
        client.state_failed.connect(lambda error, _: self.note(state_failed=str(error)))
        self._session.answer_text.connect(self._on_text)
        self._session.deleted.connect(lambda chat: self.note(deleted=chat))

    def start(self) -> None:
        """Say which chats there are, and listen."""
        chats = [chat.id for chat in self._session.library.summaries]
        self.note(started=chats, damaged=len(self._session.library.damaged))
        threading.Thread(target=self._listen, daemon=True).start()

    def stop(self) -> None:
        """Type no more."""
        self._typing.stop()

    def note(self, **facts: Any) -> None:
        """Write what a person sees now, and the engine's process."""
        switch = self._client._host
        host = switch.engine if isinstance(switch, HostSwitch) else None
        pid = host.pid if isinstance(host, ProcessHost) else None
        line = json.dumps({"at": time.time(), "engine": pid, **facts})
        os.write(1, (line + "\n").encode())

    def _listen(self) -> None:
        for line in sys.stdin:
            self._came.emit(line)
        self._came.emit('{"do": "leave"}')  # the campaign is gone

    @Slot(str)
    def _do(self, line: str) -> None:
        command = json.loads(line)
        getattr(self, command.pop("do"))(**command)

    # what can be done

    def leave(self) -> None:
        """Close the window in order."""
        QApplication.quit()

    def open_model(self, path: str) -> None:
        self._shell.models.open(path)

    def ask(self, text: str, max_tokens: int, ignore_eos: bool = True) -> None:
        """Ask in a new chat, with greedy answers."""
        self._shell.window.sampling.set_params(
            SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, on_overflow="shift"
            )
        )
        self._shell.chat_presenter.new_chat()
        chat = self._session.current.id
        self.note(asked=text, chat=chat, message=self._next_message())
        self._shell.chat_presenter.send(text)
        if self._client._states:
            self.note(saving=True)

    def regenerate(self) -> None:
        """Have the last question answered again, in a version of its own."""
        self._session.regenerate()

    def reword(self, text: str) -> None:
        """Ask the first question in other words, in a branch of its own."""
        chat = self._session.current
        self.note(asked=text, chat=chat.id, message=self._next_message())
        self._session.edit(chat.messages[0].id, text)

    def type_text(self) -> None:
        """Type into the field below the chat, without end."""
        self._typing.start()

    def open_chat(self, chat: str) -> None:
        self._shell.chat_presenter.open_chat(chat)

    def delete_chat(self, chat: str) -> None:
        self._shell.chat_presenter.delete_chats([chat])

    def stop_answer(self) -> None:
        self._typing.stop()
        self._session.stop()
        self.note(stopped=True, busy=self._session.is_busy)

    def split(self, n_ranks: int) -> None:
        """Split the loaded model anew, evenly."""
        assert self._client.model is not None
        params = self._client.model.params
        self._shell.models.apply(replace(params, devices=("cpu",) * n_ranks, split=None))

    def recover(self) -> None:
        """Click on what the window offers after the engine has died."""
        self._shell.window.banner._action.click()

    def look(self) -> None:
        """Note the last message that is shown, and what the window does."""
        message = (self._session.current.messages or [Message("assistant", "")])[-1]
        self.note(
            shown=message.content,
            chat=self._session.current.id,
            problem=message.problem,
            offer=notice.action if (notice := self._shell.window.banner.notice) else "",
            busy=self._session.is_busy,
            state=self._client.state.value,
            model=self._client.model is not None,
        )

    # what is seen

    @Slot(str)
    def _on_text(self, text: str) -> None:
        chat = self._session.current
        self.note(text=text, chat=chat.id, message=chat.messages[-1].id)

    def _next_message(self) -> int:
        """Return the id that the next message of the open chat has."""
        return 1 + max((message.id for message in self._session.current.tree), default=0)

    @Slot()
    def _type(self) -> None:
        edit = self._shell.window.composer.edit
        edit.moveCursor(edit.textCursor().MoveOperation.End)
        edit.insertPlainText("x")
        self.note(draft=len(edit.toPlainText()), chat=self._session.current.id)


if __name__ == "__main__":
    process_host.BACK_OFF_S = (0.0,)
    program.Shell = DrivenShell  # type: ignore[assignment,misc]
    entry.run()
