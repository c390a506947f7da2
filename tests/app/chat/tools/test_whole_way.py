"""A real model calls a tool of a real server in a real window, and continues with the result."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.tool_use import CallStep
from app.core.paths import demo_model
from app.main import Shell
from app.tools.server_store import ToolServer
from engine import AnswerRequest, Command, HostEvent, SamplingParams, ThreadHost
from tests.helpers import town_server

WAIT_MS = 120_000


class ForcingHost(ThreadHost):
    """An engine whose first answer must call a tool, as few small models would do on their own."""

    def __init__(self, on_event: Callable[[HostEvent], None]) -> None:
        super().__init__(on_event)
        self.asked: list[AnswerRequest] = []

    def submit(self, command: Command, generation: int | None = None) -> int:
        if isinstance(command, AnswerRequest):
            if not self.asked:
                command = replace(command, tool_choice="required")
            self.asked.append(command)
        return super().submit(command, generation)


def test_a_model_calls_a_tool_and_goes_on_with_its_result(qtbot: QtBot, qapp: QApplication) -> None:
    hosts: list[ForcingHost] = []

    def make_host(on_event: Callable[[HostEvent], None]) -> ForcingHost:
        hosts.append(ForcingHost(on_event))
        return hosts[-1]

    path, shell = demo_model(), Shell(qapp, make_host)
    assert path is not None
    shell.start()
    try:
        qtbot.waitUntil(lambda: shell.start_up.is_ready, timeout=WAIT_MS)
        program = sys.executable, "-I", str(Path(town_server.__file__))
        shell.tools.add([ToolServer("town", program)])
        shell.models.open(str(path))
        session, chat = shell.session, shell.session.current
        qtbot.waitUntil(
            lambda: shell.client.model is not None and len(shell.tools.offered) == 2,
            timeout=WAIT_MS,
        )
        shell.window.sampling.set_params(SamplingParams(temperature=0, max_tokens=120))
        session.send("What is the weather in Rome?")
        qtbot.waitUntil(lambda: chat.messages[-1].stats is not None, timeout=WAIT_MS)
        waiting = [call for call in chat.messages[-1].calls if call.state == "waiting"]
        assert {call.server for call in waiting} == {"town"}
        view = shell.window.chat_view.last_answer()
        assert view is not None
        assert view._calls is not None
        for card in [card for card in view._calls.cards if card.is_waiting]:
            card._steps[CallStep.RUN].click()
        qtbot.waitUntil(
            lambda: len(chat.messages) == 3 and chat.messages[-1].stats is not None, timeout=WAIT_MS
        )
        done = {call.id: call for call in chat.messages[1].calls if call.state == "done"}
        assert list(done) == [call.id for call in waiting]
        for call in done.values():
            assert call.result == f"{call.title} of {json.loads(call.arguments)['city']}: fine"
        told = {turn.tool_call_id: turn.content for turn in hosts[0].asked[1].messages}
        assert told | {number: call.result for number, call in done.items()} == told
        assert not chat.messages[2].problem
    finally:
        shell.window.close()
        shell.window.deleteLater()
        shell.deleteLater()
