"""The model calls tools in the window: the user approves or refuses, and the model continues."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.store import ChatStore
from app.chat.tool_use import CallStep
from app.chat.views.answer_view import AnswerView
from app.chat.views.call_view import CallCard
from app.core.paths import chats_dir
from app.main import Shell
from app.window.parts import if_made
from engine import AnswerRequest, EngineError
from tests.helpers.fake_host import Script
from tests.helpers.fake_tools import FakeToolHub
from tests.helpers.shell_driver import MODEL, MakeShell, banner, host_of, shown

CALL = ("web_search", '{"query": "tandem", "n": 3}')
SECOND = ("files_write", '{"path": "a.txt"}')

Ready = Callable[[], tuple[Shell, FakeToolHub]]


@pytest.fixture
def ready(make_shell: MakeShell) -> Ready:
    """Return a function that starts a window with a model and tools."""

    def make() -> tuple[Shell, FakeToolHub]:
        shell, hub = make_shell(model=MODEL), FakeToolHub()
        use(shell, hub)
        return shell, hub

    return make


def use(shell: Shell, hub: FakeToolHub) -> None:
    """Make a window use the tools of a hub."""
    session = shell.tools
    session.__dict__["_hub"] = hub
    session.servers = tuple(state.server for state in hub.states())
    session.changed.emit()


def until_calls(qtbot: QtBot, shell: Shell, text: str = "Look") -> Message:
    """Ask in the open chat and return the answer with its calls."""
    shell.chat_presenter.send(text)
    chat = shell.session.current
    qtbot.waitUntil(lambda: bool(chat.messages[-1].calls) and chat.messages[-1].stats is not None)
    return chat.messages[-1]


def until_answered(qtbot: QtBot, chat: Conversation, n: int) -> None:
    """Wait until a chat has a number of messages, the last one complete."""
    qtbot.waitUntil(lambda: len(chat.messages) == n and chat.messages[-1].stats is not None)


def cards(shell: Shell) -> list[CallCard]:
    """Return the visible cards from the top."""
    views = [view for view in shell.window.chat_view.shown if isinstance(view, AnswerView)]
    return [card for view in views if view._calls is not None for card in view._calls.cards]


def states(message: Message) -> list[str]:
    return [call.state for call in message.calls]


def generations(shell: Shell) -> list[AnswerRequest]:
    return [command for command in host_of(shell).commands if isinstance(command, AnswerRequest)]


def press(card: CallCard, step: CallStep) -> None:
    """Press a button of a card, which must be visible."""
    button = card._steps[step]
    assert not button.isHidden()
    button.click()


def test_a_call_runs_when_it_may_and_the_model_goes_on_with_its_result(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.answer, script.thought, script.calls = "I look.", "Hm.", (CALL,)
    script.others["three hits"] = Script(answer="There are three.")
    asking = until_calls(qtbot, shell)
    assert asking.content == "<think>\nHm.\n</think>\n\nI look."
    assert [tool.name for tool in generations(shell)[0].tools] == ["web_search", "files_write"]
    assert generations(shell)[0].in_parts
    (card,) = cards(shell)
    assert hub.calls == [], "nothing runs before approval"
    assert card._toggle.accessibleName() == "Search the web · web, waiting for approval"
    assert card._details is not None
    assert not card._details.isHidden(), "the arguments are visible"
    press(card, CallStep.RUN)
    assert (hub.calls[0].name, hub.calls[0].arguments) == (CALL[0], json.loads(CALL[1]))
    assert states(asking) == ["running"]
    assert shell.window.composer._send.text() == "Stop"
    hub.calls[0].end("three hits")
    until_answered(qtbot, shell.session.current, 3)
    assert states(asking) == ["done"]
    assert not card._details, "the result is collapsed"
    assert shown(shell) == ["Look", "I look.", "There are three."]
    told = generations(shell)[1].messages
    assert [(m.role, m.content) for m in told] == [
        ("user", "Look"), ("assistant", "I look."), ("tool", "three hits"),
    ]  # fmt: skip
    assert told[1].reasoning == "Hm."
    assert told[1].tool_calls[0].id == told[2].tool_call_id == asking.calls[0].id
    assert (told[2].name, told[1].tool_calls[0].arguments) == CALL


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_the_model_is_told_that_a_call_has_no_result(
    qtbot: QtBot, ready: Ready, script: Script, how: str
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    told = {"refused": "The user refused this call.", "failed": "No such place."}[how]
    script.others[told] = Script(answer="Then not.")
    asking = until_calls(qtbot, shell)
    if how == "refused":
        press(cards(shell)[0], CallStep.REFUSE)
    else:
        press(cards(shell)[0], CallStep.RUN)
        hub.calls[0].end("No such place.", is_error=True)
    until_answered(qtbot, shell.session.current, 3)
    assert states(asking) == [how]
    assert shown(shell)[-1] == "Then not."


def test_several_calls_run_together_and_the_model_waits_for_all(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL, SECOND)
    script.others["second"] = Script(answer="Both.")
    asking = until_calls(qtbot, shell)
    shell.window.activateWindow()
    first, second = cards(shell)
    first.take_focus()
    press(first, CallStep.RUN)
    press(second, CallStep.RUN)
    hub.calls[1].end("second")
    qtbot.waitUntil(lambda: states(asking) == ["running", "done"])
    assert len(generations(shell)) == 1
    hub.calls[0].end("first")
    until_answered(qtbot, shell.session.current, 3)
    assert [m.content for m in generations(shell)[1].messages[2:]] == ["first", "second"]


def test_stop_ends_calls_and_nothing_goes_on_until_it_is_wanted(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    asking = until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    shell.window.stop_requested.emit()
    assert hub.calls[0].is_cancelled
    assert states(asking) == ["stopped"]
    assert shell.window.composer._send.text() == "Send"
    hub.calls[0].end("too late")
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert len(shell.session.current.messages) == 2
    stopped = "The user stopped this call before it had a result."
    script.others[stopped] = Script(answer="Well.")
    answer.footer.go_on.click()
    until_answered(qtbot, shell.session.current, 3)
    assert states(asking) == ["stopped"]
    assert generations(shell)[1].messages[-1].content == stopped


def test_the_button_of_one_call_stops_it_and_the_model_goes_on(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    script.others["The user stopped this call before it had a result."] = Script(answer="Ok.")
    until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    press(cards(shell)[0], CallStep.STOP)
    assert hub.calls[0].is_cancelled
    until_answered(qtbot, shell.session.current, 3)


def test_a_new_message_refuses_what_waits(qtbot: QtBot, ready: Ready, script: Script) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    script.others["Never mind."] = Script(answer="Fine.")
    asking = until_calls(qtbot, shell)
    shell.chat_presenter.send("Never mind.")
    until_answered(qtbot, shell.session.current, 4)
    assert states(asking) == ["refused"]
    assert hub.calls == []
    roles = [message.role for message in generations(shell)[1].messages]
    assert roles == ["user", "assistant", "tool", "user"]


def test_a_message_is_not_sent_while_a_call_runs(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, _ = ready()
    script.calls = (CALL,)
    asking = until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    assert not shell.session.send("And?")
    assert states(asking) == ["running"]
    assert banner(shell).startswith("The answer is still being written")


@pytest.mark.parametrize(
    ("call", "says"),
    [(("nothing", "{}"), "There is no tool nothing."),
     (("web_search", "[1]"), "The arguments are not a JSON object.")],
)  # fmt: skip
def test_a_call_that_cannot_run_has_failed_and_the_model_is_told(
    qtbot: QtBot, ready: Ready, script: Script, call: tuple[str, str], says: str
) -> None:
    shell, hub = ready()
    script.calls = (call,)
    script.others[says] = Script(answer="I see.")
    shell.chat_presenter.send("Look")
    until_answered(qtbot, shell.session.current, 3)
    assert states(shell.session.current.messages[1]) == ["failed"]
    assert generations(shell)[1].messages[1].tool_calls[0].arguments == "{}"
    assert hub.calls == []


@pytest.mark.parametrize("reason", ["length", "context"])
def test_a_call_that_was_cut_off_never_runs(
    qtbot: QtBot, ready: Ready, script: Script, reason: str
) -> None:
    """An earlier call may; the model gets a result for the other, without its arguments."""
    shell, hub = ready()
    cut = (SECOND[0], '{"path": "home/an')
    script.calls, script.reason = (CALL, cut), reason
    asking = until_calls(qtbot, shell)
    assert states(asking) == ["waiting", "cut"]
    assert asking.calls[1].result.startswith("The answer ended before this call was complete")
    first, second = cards(shell)
    assert all(button.isHidden() for button in second._steps.values())
    assert second._toggle.accessibleName().endswith("cut off")
    told = "This call was cut off before it was complete, so it did not run."
    script.others[told] = Script(answer="Again.")
    press(first, CallStep.RUN)
    hub.calls[0].end("found")
    until_answered(qtbot, shell.session.current, 3)
    _, sent, result, of_cut = generations(shell)[1].messages
    assert [call.arguments for call in sent.tool_calls] == [CALL[1], "{}"]
    assert (result.content, of_cut.content) == ("found", told)
    assert len(hub.calls) == 1


def test_calls_wait_over_a_restart(
    qtbot: QtBot, ready: Ready, script: Script, make_shell: MakeShell
) -> None:
    shell, _ = ready()
    script.calls = (CALL, SECOND)
    until_calls(qtbot, shell)
    press(cards(shell)[1], CallStep.RUN)
    shell.window.close()
    again, hub = make_shell(model=MODEL), FakeToolHub()
    use(again, hub)
    asking = again.session.current.messages[-1]
    assert states(asking) == ["waiting", "stopped"], "running calls end with the window"
    script.others["The user stopped this call before it had a result."] = Script(answer="On.")
    press(cards(again)[0], CallStep.RUN)
    hub.calls[0].end("found")
    until_answered(qtbot, again.session.current, 3)
    assert [m.content for m in generations(again)[0].messages][2] == "found"


def test_what_ran_when_the_window_was_killed_has_stopped(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, _ = ready()
    script.calls = (CALL,)
    until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    shell.session.flush()
    store = ChatStore(chats_dir())
    query = "SELECT data FROM messages WHERE id = 2"
    (data,) = store.database.read(lambda file: file.execute(query).fetchone())
    assert json.loads(data)["calls"][0]["state"] == "running"
    assert states(store.load()[0].messages[1]) == ["stopped"]


def test_a_deleted_chat_ends_its_calls_and_can_come_back(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    asking, chat = until_calls(qtbot, shell), shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    shell.chat_presenter.delete_chats([chat.id])
    assert hub.calls[0].is_cancelled
    hub.calls[0].end("too late")
    shell.window.banner._action.click()
    assert shell.session.current is chat
    assert states(asking) == ["stopped"]
    assert len(chat.messages) == 2


def test_a_deleted_message_ends_its_calls(qtbot: QtBot, ready: Ready, script: Script) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    asking = until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    shell.chat_presenter._steps[_delete()](asking.id)
    assert hub.calls[0].is_cancelled
    assert len(shell.session.current.messages) == 1


def _delete() -> object:
    from app.chat.views.message_parts import MessageStep

    return MessageStep.DELETE


def test_two_chats_have_calls_at_once(qtbot: QtBot, ready: Ready, script: Script) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    script.others |= {"for one": Script(answer="One."), "for two": Script(answer="Two.")}
    until_calls(qtbot, shell, "First")
    first = shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    shell.chat_presenter.new_chat()
    until_calls(qtbot, shell, "Second")
    second = shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    hub.calls[0].end("for one")
    until_answered(qtbot, first, 3)
    assert shell.session.current is second
    hub.calls[1].end("for two")
    until_answered(qtbot, second, 3)
    assert [chat.messages[-1].content for chat in (first, second)] == ["One.", "Two."]


def test_a_chat_that_is_not_seen_says_that_it_waits(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, _ = ready()
    script.others["Slow"] = slow = Script(answer="Slowly.", hold=True, hold_after=1, calls=(CALL,))
    shell.chat_presenter.send("Slow")
    chat = shell.session.current
    qtbot.waitUntil(lambda: bool(chat.messages[-1].content))
    shell.chat_presenter.new_chat()
    host_of(shell).let_go(slow)
    qtbot.waitUntil(lambda: banner(shell) == "“Slow”: a tool call is waiting for approval.")
    shell.window.banner._action.click()
    assert shell.session.current is chat


def test_an_answer_is_written_again_behind_the_same_results(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    script.others["hits"] = Script(answer="So.")
    asking, chat = until_calls(qtbot, shell), shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    hub.calls[0].end("hits")
    until_answered(qtbot, chat, 3)
    script.others["hits"].answer = "Or so."
    shell.session.regenerate()
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None and len(chat.tree) == 4)
    assert chat.messages[-1].parent == asking.id
    assert len(hub.calls) == 1, "no tool runs again"
    shell.session.regenerate(asking.id)
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None and len(chat.tree) == 5)
    assert states(chat.messages[-1]) == ["waiting"]
    assert [m.id for m in chat.tree.versions(asking.id)] == [asking.id, chat.messages[-1].id]


def test_calls_of_a_branch_that_is_not_shown_do_not_go_on_by_themselves(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    asking, chat = until_calls(qtbot, shell), shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    script.calls = ()
    shell.session.regenerate()
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None and chat.messages[-1] is not asking)
    hub.calls[0].end("hits")
    qtbot.waitUntil(lambda: states(asking) == ["done"])
    assert len(chat.tree) == 3
    shell.session.choose(asking.id)
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert answer.footer.go_on.isVisible()


def test_a_lost_answer_goes_on_inside_of_its_call(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    """The engine gets all tokens; its text continues the same call."""
    shell, _ = ready()
    script.answer, script.calls = "I look.", (("web_search", '{"query": "tan'),)
    script.answer_error = EngineError("The card is gone.")
    shell.chat_presenter.send("Look")
    chat = shell.session.current
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None)
    assert states(chat.messages[-1]) == ["writing"]
    (card,) = cards(shell)
    assert card._state.text() == "cut off"
    script.answer, script.calls, script.answer_error = "", (), None
    script.extra = [_more('dem"}')]
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    answer.footer.go_on.click()
    qtbot.waitUntil(lambda: states(chat.messages[-1]) == ["waiting"])
    resumed = generations(shell)[1]
    assert resumed.continue_last
    assert resumed.begun[-1] == 100
    assert resumed.messages[-1].tool_calls == ()
    assert chat.messages[-1].calls[0].arguments == '{"query": "tandem"}'


def _more(text: str) -> object:
    from engine import ToolCallText

    return ToolCallText(0, text)


def test_what_was_cut_off_is_written_again_where_its_tokens_are_not_known(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, _ = ready()
    script.answer, script.calls = "I look.", (("web_search", '{"query": "tan'),)
    script.answer_error = EngineError("The card is gone.")
    shell.chat_presenter.send("Look")
    chat = shell.session.current
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None)
    shell.session._writer.cuts.clear()  # as after a restart
    script.answer, script.calls, script.answer_error = "", (CALL,), None
    shell.session.go_on()
    qtbot.waitUntil(lambda: states(chat.messages[-1]) == ["waiting"])
    assert chat.messages[-1].content == "I look."
    assert chat.messages[-1].calls[0].arguments == CALL[1]


def test_after_many_rounds_a_person_is_asked(
    qtbot: QtBot, ready: Ready, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat.call_flow.MAX_ROUNDS", 3)
    shell, _ = ready()
    script.calls = (("nothing", "{}"),)
    shell.chat_presenter.send("Again and again")
    chat = shell.session.current
    says = "“Again and again”: The model has called tools 3 times in a row."
    qtbot.waitUntil(lambda: banner(shell) == says)
    assert len(chat.messages) == 4
    script.calls = ()
    shell.window.banner._action.click()
    until_answered(qtbot, chat, 5)


def test_tools_can_be_switched_off_for_a_chat(qtbot: QtBot, ready: Ready, script: Script) -> None:
    shell, _ = ready()
    switch = if_made(shell, "tool_switch")
    assert switch is not None
    assert (switch.button.text(), switch.button.isHidden()) == ("Tools: 2 ▾", False)
    switch._fill()
    _, _, web, files = switch.menu.actions()
    assert [web.text(), files.text()] == ["web · 1 tool", "files · 1 tool"]
    files.trigger()
    assert switch.button.text() == "Tools: 1 ▾"
    shell.chat_presenter.send("One")
    until_answered(qtbot, shell.session.current, 2)
    switch._fill()
    switch.menu.actions()[0].trigger()
    shell.chat_presenter.send("Two")
    until_answered(qtbot, shell.session.current, 4)
    one, two = generations(shell)
    assert [tool.name for tool in one.tools] == ["web_search"]
    assert (two.tools, two.in_parts) == ((), False)
    shell.chat_presenter.new_chat()
    assert switch.button.text() == "Tools: 2 ▾", "other chats have all"


def test_without_servers_there_is_no_switch(make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    assert if_made(shell, "tool_switch") is None
    use(shell, FakeToolHub(()))
    assert if_made(shell, "tool_switch") is not None
    assert shell.tool_switch.button.isHidden()


def test_the_context_counts_tools_calls_and_results(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    script.others["many hits"] = Script(answer="So.")
    until_calls(qtbot, shell)
    press(cards(shell)[0], CallStep.RUN)
    hub.calls[0].end("many hits")
    until_answered(qtbot, shell.session.current, 3)
    counter = shell.chat_presenter._context.counter
    qtbot.waitUntil(lambda: counter.is_current)
    counted = [command for command in host_of(shell).counts if command.messages]  # type: ignore[union-attr]
    assert [m.role for m in counted[-1].messages] == ["user", "assistant", "tool", "assistant"]  # type: ignore[union-attr]
    assert len(counted[-1].tools) == 2  # type: ignore[union-attr]


def test_a_fork_has_the_calls_but_not_what_runs(qtbot: QtBot, ready: Ready, script: Script) -> None:
    shell, _ = ready()
    script.calls = (CALL, SECOND)
    asking, chat = until_calls(qtbot, shell), shell.session.current
    press(cards(shell)[0], CallStep.RUN)
    made = chat.fork(asking.id)
    assert states(made.messages[-1]) == ["stopped", "waiting"]
    assert states(asking) == ["running", "waiting"]


def test_an_imported_chat_has_nothing_to_run(tmp_path: Path) -> None:
    """A call in a file may have a false title, so the user could not know what would run."""
    from app.chat.export import exported, imported
    from app.chat.tool_use import ToolUse

    call = ToolUse("1", "shell_run", "web", "Search", "{}", "waiting")
    chat = Conversation.of([Message("user", "?"), Message("assistant", "", calls=(call,))])
    path = tmp_path / "chat.json"
    path.write_text(exported(chat, ".json"))
    assert states(imported(path).messages[1]) == ["stopped"]


def test_a_result_that_the_context_cannot_hold_is_cut(
    qtbot: QtBot, ready: Ready, script: Script
) -> None:
    shell, hub = ready()
    script.calls = (CALL,)
    asking, chat = until_calls(qtbot, shell), shell.session.current
    script.calls = ()
    press(cards(shell)[0], CallStep.RUN)
    hub.calls[0].end("x" * 10_000)
    until_answered(qtbot, chat, 3)
    cut = "x" * 8192 + "\n[Truncated: the first 8192 of 10000 characters.]"
    assert asking.calls[0].result == generations(shell)[1].messages[-1].content == cut
