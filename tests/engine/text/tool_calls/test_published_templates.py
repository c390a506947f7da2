"""Calls survive the chat templates that are published with models; a folder has the templates.

`TANDEM_TEMPLATES=FOLDER python -m pytest -m slow tests/engine/text/tool_calls/\
test_published_templates.py` reads all of FOLDER/*.jinja, such as `models/templates` of llama.cpp.
"""

import json
import os
from pathlib import Path

import pytest

from engine.errors import TemplateError
from engine.text.chat_template import ChatTemplate
from engine.text.messages import ChatMessage, Tool, ToolCall
from engine.text.tool_calls.turns import ANSWER_FORMATS, TemplateUse, as_functions, detect
from tests.helpers.answer_texts import Read, parsed

FOLDER = Path(os.environ.get("TANDEM_TEMPLATES") or os.devnull)
FOUND = {
    "Apriel": "apriel", "ByteDance-Seed": "seed", "Cohere2MoE": "cohere", "GLM-": "glm",
    "CohereForAI-c4ai-command-r7b": "cohere", "GigaChat3.1": "gigachat", "MiniMax-M2": "minimax",
    "Mistral-Small-3.2": "mistral_args", "Ministral-3": "mistral_args", "Nemotron-3": "qwen_coder",
    "Devstral": "mistral_args", "Mistral-Nemo": "mistral", "Nemotron-Nano-v2": "nemotron",
    "Nous": "hermes", "Qwen-Q": "hermes", "Qwen3-Coder": "qwen_coder", "Qwen3.5": "qwen_coder",
    "tepfun": "qwen_coder", "DeepSeek-R1-Distill": "deepseek", "DeepSeek-V3.1": "deepseek_v31",
    "DeepSeek-V3.2": "deepseek_v32", "DeepSeek-V4": "deepseek_v4", "gemma-4": "gemma4",
    "granite-4": "hermes", "functionary-medium-v3.1": "functionary", "meta-llama-Llama-3.": "llama",
    "Kimi-K2": "kimi", "granite-3.3": "granite", "gpt-oss": "harmony",
}  # fmt: skip
"""Formats by a part of a file's name."""

QUESTION = "Will it rain this week?"
TOOLS = (
    Tool(
        "get_weather", "Tell the weather.",
        json.dumps({"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "City"},
            "days": {"type": "integer", "description": "Days"},
            "where": {"type": "object", "description": "Place"}}}),
    ),
    Tool("clock", "Tell the time.", '{"type": "object", "properties": {}}'),
)  # fmt: skip
TYPES = {"get_weather": {"city": ("string",), "days": ("integer",), "where": ("object",)}}
TYPES["clock"] = {}
WEATHER = {"city": 'Köln "Süd"', "days": 3, "where": {"x": [1, 2.5, "a"], "y": True}}
CALLS = (
    ToolCall("get_weather", json.dumps(WEATHER), "call00001"),
    ToolCall("clock", "{}", "call00002"),
)
THOUGHT = "They mean the town."


def rendered(
    template: ChatTemplate, use: TemplateUse, thought: str, calls: tuple[ToolCall, ...]
) -> tuple[str, str]:
    """Return the prompt of a question and the conversation with an answer that calls."""
    tools = as_functions(TOOLS) if use.shows_tools else None
    question = ChatMessage("user", QUESTION)
    asked = use.turns([question], TOOLS)
    called = use.turns([question, ChatMessage("assistant", "", thought, calls)], TOOLS)
    return template.render(asked, tools), template.render(called, tools, False)


def read_back(use: TemplateUse, prompt: str, text: str) -> Read:
    """Return the parts of the answer in a conversation."""
    if text.startswith(prompt):
        return parsed(use.form, [text[len(prompt) :]], prompt=prompt, types=TYPES)
    return parsed(use.form, [text.rpartition(QUESTION)[2]], types=TYPES)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="TANDEM_TEMPLATES names no folder")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_calls_survive_a_published_template(path: Path) -> None:
    template = ChatTemplate(path.read_text("utf-8"), "<bos>", "<eos>")
    use = detect(template)
    for part, name in FOUND.items():
        assert part not in path.stem or use.form.name == name
    try:
        template.render(
            [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "No."}]
        )
    except TemplateError as error:
        pytest.skip(f"answers no question: {error}")
    marks = [form.trigger for form in ANSWER_FORMATS if form.trigger]
    for thought in ("", THOUGHT):
        for calls in (CALLS[:1], CALLS):
            prompt, text = rendered(template, use, thought, calls)
            if use.takes_one_call and len(calls) > 1:
                told = [text.rpartition(QUESTION)[2].count(call.name) for call in calls]
                assert 0 not in told
                continue
            read = read_back(use, prompt, text)
            assert read.calls == [(call.name, json.loads(call.arguments)) for call in calls]
            if use.form.thought[0].strip() in text and THOUGHT in text:
                assert read.reasoning == thought
                assert THOUGHT not in read.content
            assert not [mark for mark in marks if mark in read.content]
