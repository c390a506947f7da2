"""Forms whose calls are JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

from engine.text.tool_calls.formats.base import LISTED, OBJECT, TEXT, AnswerFormat, described

HERMES = AnswerFormat(
    "hermes",
    described(
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": OBJECT}
    ),
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    behind="}\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
MISTRAL = AnswerFormat(
    "mistral",
    described(
        {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": LISTED,
            "transform_each": True,
        },
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before='{"name": "NAME", "arguments": ',
    behind="}",
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)


def _listed(name: str, opening: str, closing: str) -> AnswerFormat:
    """Return a form in which a list of calls stands between two marks."""
    field = {"open": opening, "content": "json", "transform": LISTED, "transform_each": True}
    return AnswerFormat(
        name,
        described({**field, "close": closing} if closing else field),
        before='{"name": "NAME", "arguments": ',
        behind="}",
        between=", ",
        around=(opening + "[", "]" + closing),
        trigger=opening,
    )


NEMOTRON = _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = _listed("apriel", "<tool_calls>", "</tool_calls>")
GRANITE = _listed("granite", "<|tool_call|>", "")
COHERE = AnswerFormat(
    "cohere",
    described(
        {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
            },
            "transform_each": True,
        },
        reasoning_content=TEXT | {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        content=TEXT
        | {
            "open_pattern": r"<\|START_(?:RESPONSE|TEXT)\|>",
            "close_pattern": r"<\|END_(?:RESPONSE|TEXT)\|>",
        },
    ),
    before='{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
    behind="}",
    between=",\n    ",
    around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    trigger="<|START_ACTION|>",
    thought=("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
)
GIGACHAT = AnswerFormat(
    "gigachat",
    described({"open": "<|function_call|>", "content": "json", "transform": OBJECT}),
    before='<|function_call|>{"name": "NAME", "arguments": ',
    behind="}",
    between=None,
    trigger="<|function_call|>",
)
