"""A conversation that is too long loses its oldest messages, and no more of them than it must."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import ChatMessage, Tool, ToolCall
from engine.formats.gguf.reader import GGUFFile
from engine.generation.prompts import Prompts, droppable
from engine.text.chat_template import ChatTemplate
from tests.helpers.tiny_gguf import tiny_gguf

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(
    st.builds(ChatMessage, roles, st.text("ab", max_size=30)), min_size=1, max_size=12
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    path = tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", chat_template=TEMPLATE)
    with GGUFFile.open(path) as file:
        return Prompts(file, "tiny")


def fitting(prompts: Prompts, turns: list[ChatMessage], n_ctx: int) -> list[int]:
    """Return the prompt that leaves an eighth free, by dropping one question after another."""
    left = list(turns)
    while True:
        ids = prompts.chat(left, 0, continue_last=False, is_shortened=False).ids
        first = next((i for i, m in enumerate(left[:-1]) if m.role != "system"), None)
        if len(ids) < n_ctx - max(1, n_ctx // 8) or first is None:
            return ids
        n = 1 + (first + 1 < len(left) - 1 and left[first + 1].role == "assistant")
        del left[first : first + n]


@given(conversations, st.integers(8, 200))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_more_is_dropped_than_must_be(
    prompts: Prompts, turns: list[ChatMessage], n_ctx: int
) -> None:
    found = prompts.chat(turns, n_ctx, continue_last=False, is_shortened=True)
    whole = prompts.chat(turns, 0, continue_last=False, is_shortened=False)
    assert found.ids == fitting(prompts, turns, n_ctx)
    assert found.n_dropped == len(whole.ids) - len(found.ids)


def test_a_long_conversation_is_rendered_a_few_times(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of the 300 answers that do not fit."""
    turns = [ChatMessage(("user", "assistant")[i % 2], "ab" * 9) for i in range(601)]
    n_renders, render = 0, ChatTemplate.render

    def counted(template: ChatTemplate, *args: object, **options: object) -> str:
        nonlocal n_renders
        n_renders += 1
        return render(template, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ChatTemplate, "render", counted)
    found = prompts.chat(turns, 300, continue_last=False, is_shortened=True)
    assert 0 < len(found.ids) < 300
    assert n_renders <= 12


def test_a_call_and_its_results_are_dropped_together(prompts: Prompts) -> None:
    """And what the last calls answer stays."""
    call = (ToolCall("f", "{}", "c"),)
    asked = [
        ChatMessage("user", "a" * 20), ChatMessage("assistant", "", tool_calls=call),
        ChatMessage("tool", "b" * 20, tool_call_id="c"), ChatMessage("assistant", "c" * 20),
    ]  # fmt: skip
    turns = [ChatMessage("system", "s"), *asked, *asked[:3]]
    assert droppable(turns, 1) == [range(1, 5)]
    assert droppable([*turns, asked[3]], 2) == [range(1, 5)]
    assert droppable([*asked, *asked], 1) == [range(4), range(4, 7)]
    kept = prompts.chat(turns, 150, continue_last=False, is_shortened=True)
    whole = prompts.chat([turns[0], *asked[:3]], 0, continue_last=False, is_shortened=False)
    assert kept.ids == whole.ids
    assert kept.n_dropped


def test_what_stays_once_all_older_messages_are_dropped_is_counted(prompts: Prompts) -> None:
    system = [ChatMessage("system", "s" * 9)]
    older = [ChatMessage("user", "a" * 20), ChatMessage("assistant", "b" * 20)]
    n_before, n_draft, n_kept = prompts.count([*system, *older], "c" * 7)
    alone = prompts.count(system, "c" * 7)
    assert (n_kept, n_draft) == alone[:2]
    assert alone[0] == alone[2]
    assert n_before is not None
    assert n_kept is not None
    assert n_before > n_kept > 0


def test_calls_and_functions_are_counted(prompts: Prompts) -> None:
    plain = [ChatMessage("user", "a"), ChatMessage("assistant", "b")]
    called = [plain[0], ChatMessage("assistant", "b", tool_calls=(ToolCall("f", "{}"),))]
    few, many = (prompts.count(messages, "c")[0] for messages in (plain, called))
    assert few is not None
    assert many is not None
    assert few < many
    offered = prompts.count(plain, "c", [Tool("f", "Does what nobody knows.")])[0]
    assert offered is not None
    assert offered > few + len("Does what nobody knows.") // 4
