"""Forms whose calls have a name in the mark and an object of arguments behind it."""

from __future__ import annotations

from engine.text.tool_calls.formats.base import (
    JSON_BEHIND_NAME,
    NAME,
    TEXT,
    AnswerFormat,
    described,
)

_S = r"[ \t\r\n]{0,40}"
_LLAMA_LEAD = rf'\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"'
_LLAMA_TAIL = rf'"{_S},{_S}"parameters"{_S}:'
LLAMA = AnswerFormat(
    "llama",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"(?:<\|python_tag\|>)?{_LLAMA_LEAD}{NAME}{_LLAMA_TAIL}",
            "close_pattern": r"\}\s*(?:;|\Z)",
        }
    ),
    before='{"name": "NAME", "parameters": ',
    behind="}",
    between=None,
    noise=("<|python_tag|>",),
    is_bare=True,
    around_name=(_LLAMA_LEAD, _LLAMA_TAIL),
)
MISTRAL_ARGS = AnswerFormat(
    "mistral_args",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\][\w-]{{1,64}})?(?:\[ARGS\])?",
        },
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before="[TOOL_CALLS]NAME[ARGS]",
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)
HARMONY = AnswerFormat(
    "harmony",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?"
                rf" to=functions\.{NAME}(?:<\|channel\|>(?:commentary|analysis))?"
                r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>|<\|end\|>",
        },
        reasoning_content=TEXT
        | {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
        },
        content=TEXT
        | {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                r"\s*(?:<\|constrain\|>[\w-]{1,64})?<\|message\|>"
            ),
            "close_pattern": r"<\|end\|>|<\|return\|>",
        },
    ),
    before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    resumed="<|start|>assistant",
    between=None,
    trigger="<|channel|>commentary to=functions.",
    thought=(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    noise=("<|start|>assistant",),
)
DEEPSEEK = AnswerFormat(
    "deepseek",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\s*```json",
            "close_pattern": r"```\s*<｜tool▁call▁end｜>",
        }
    ),
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    behind="\n```<｜tool▁call▁end｜>",
    between="\n",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    trigger="<｜tool▁calls▁begin｜>",
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = AnswerFormat(
    "deepseek_v31",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
        }
    ),
    before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    behind="<｜tool▁call▁end｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    trigger="<｜tool▁calls▁begin｜>",
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
GEMMA = AnswerFormat(
    "gemma4",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<\|tool_call>call:{NAME}",
            "close": "<tool_call|>",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        reasoning_content=TEXT | {"open": "<|channel>thought", "close": "<channel|>"},
    ),
    before="<|tool_call>call:NAME",
    behind="<tool_call|>",
    trigger="<|tool_call>",
    thought=("<|channel>thought\n", "\n<channel|>"),
)
KIMI = AnswerFormat(
    "kimi",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": (
                r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w./-]{1,128}):[0-9]{1,9}"
                r"\s*<\|tool_call_argument_begin\|>"
            ),
            "close": "<|tool_call_end|>",
        }
    ),
    before="<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
    behind="<|tool_call_end|>",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call_id="functions.NAME:INDEX",
    trigger="<|tool_calls_section_begin|>",
    noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
FUNCTION_GEMMA = AnswerFormat(
    "function_gemma",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<start_function_call>call:{NAME}",
            "close": "<end_function_call>",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        }
    ),
    before="<start_function_call>call:NAME",
    behind="<end_function_call>",
    trigger="<start_function_call>",
)
FUNCTIONARY = AnswerFormat(
    "functionary",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<function={NAME}>",
            "close": "</function>",
        }
    ),
    before="<function=NAME>",
    behind="</function>",
    trigger="<function=",
)
