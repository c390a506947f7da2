"""Which chat templates ask whether the model shall think, and what they are told."""

from pathlib import Path

import pytest

from engine import ChatMessage, read_model_info
from engine.formats.gguf.reader import GGUFFile
from engine.generation.prompts import PromptOptions, Prompts
from engine.text.messages import (
    ThoughtMarker,
    can_think,
    has_effort,
    thinking_marks,
    thinking_state,
)
from tests.helpers.tiny_gguf import tiny_gguf

QWEN = "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'x' }}{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
GRANITE = "{%- if thinking %}think{% endif %}"


@pytest.mark.parametrize(
    "template", [QWEN, DEEPSEEK, GRANITE, "{% if tools and thinking %}{% endif %}"]
)
def test_templates_that_ask_are_known(template: str) -> None:
    assert can_think(template)


@pytest.mark.parametrize(
    "template",
    ["", "{{ messages }}", "{% if message.thinking %}{{ message.thinking }}{% endif %}",
     "You are thinking aloud.", "{%- set thinking = '' %}", "{{ reasoning_effort }}"],
)  # fmt: skip
def test_others_are_not(template: str) -> None:
    assert not can_think(template)


@pytest.mark.parametrize("template", ["<think>{{ messages }}</think>", "{{ messages }}"])
def test_a_file_tells_whether_its_template_knows_thoughts(tmp_path: Path, template: str) -> None:
    """As that of a model has that always thinks, and is not asked whether it shall."""
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=template)
    assert read_model_info(path).has_thoughts == ("think>" in template)


TEMPLATE = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}none{% endif %}"


@pytest.mark.parametrize(("thinks", "said"), [(None, "none"), (True, "True"), (False, "False")])
def test_a_prompt_tells_the_template(tmp_path: Path, thinks: bool | None, said: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=TEMPLATE)
    assert read_model_info(path).can_think
    with GGUFFile.open(path) as file:
        prompts = Prompts(file, "m")
        made = prompts.chat(
            (ChatMessage("user", "Hi"),),
            64,
            continue_last=False,
            is_shortened=False,
            options=PromptOptions.of(thinks, ""),
        )
        assert prompts.tokenizer.decode(made.ids).strip().endswith(said)


def test_a_template_is_told_how_much_to_think(tmp_path: Path) -> None:
    template = "{{ reasoning_effort if reasoning_effort is defined else 'none' }}"
    assert has_effort(template)
    assert not has_effort(TEMPLATE)
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=template)
    info = read_model_info(path)
    assert info.has_effort
    assert not info.can_think
    with GGUFFile.open(path) as file:
        prompts = Prompts(file, "m")
        for effort, said in (("", "none"), ("high", "high")):
            made = prompts.chat(
                (ChatMessage("user", "Hi"),),
                64,
                continue_last=False,
                is_shortened=False,
                options=PromptOptions.of(None, effort),
            )
            assert prompts.tokenizer.decode(made.ids).strip().endswith(said)


@pytest.mark.parametrize(
    ("template", "prompt", "state"),
    [
        ("<think>", "<|im_start|>assistant\n<think>\n", "open"),
        ("</think>", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "over"),
        ("<think>", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", "possible"),
        ("[THINK]", "[/INST]", "possible"),
        ("<|channel>thought", "<|turn>model\n<|channel>thought\n<channel|>", "over"),
        ("<seed:think>", "<seed:bos>assistant\n<seed:think>", "open"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "open"),
        ("<|channel|>final", "<|start|>assistant<|channel|>final<|message|>", "over"),
        ("<|START_THINKING|>", "<|CHATBOT_TOKEN|>", "open"),
    ],
)
def test_a_prompt_s_end_says_where_thinking_is(template: str, prompt: str, state: str) -> None:
    marks = thinking_marks(f"... {template} ...")
    assert marks is not None
    assert thinking_state(prompt, marks, None, is_chat=True) == state
    wanted = "over" if state == "possible" else state
    assert thinking_state(prompt, marks, False, is_chat=True) == wanted
    if not marks.is_always:
        assert thinking_state(prompt, marks, None, is_chat=False) == wanted


def test_a_template_without_marks_knows_no_thinking() -> None:
    assert thinking_marks("{{ messages[0].content }}") is None


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["!a", "!b", "c", "d"], "<think>\nab\n</think>\n\ncd"),
        (["c", "!late", "d"], "clated"),
        (["!a"], "<think>\na"),
        (["", "!", "c"], "c"),
    ],
)
def test_a_thought_in_front_gets_marks(parts: list[str], text: str) -> None:
    marker = ThoughtMarker()
    written = [marker.written(p.removeprefix("!"), is_thought=p.startswith("!")) for p in parts]
    assert "".join(written) == text


def test_a_thought_is_closed_once_and_where_it_was_open_before() -> None:
    assert ThoughtMarker().closed() == ""
    marker = ThoughtMarker(is_open=True)
    assert marker.written("more", is_thought=True) == "more"
    assert marker.closed() == "\n</think>\n\n"
    assert marker.closed() == ""
    assert marker.written("x", is_thought=True) == "x"
