"""Forms whose calls have each argument in tags of its own."""

from __future__ import annotations

from engine.text.tool_calls.formats.base import (
    KEY,
    NAME,
    TAGS_BEHIND_NAME,
    TEXT,
    VALUE,
    AnswerFormat,
    described,
)

QWEN_CODER = AnswerFormat(
    "qwen_coder",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"(?:<tool_call>\s*)?<function={NAME}>",
            "close_pattern": r"</function>(?:\s*</tool_call>)?",
            "content_args": {"tag_pattern": rf"<parameter={KEY}>\n?{VALUE}\n?</parameter>"},
        }
    ),
    before="<tool_call>\n<function=NAME>\n",
    argument=("<parameter=NAME>\n", "\n</parameter>\n"),
    behind="</function>\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
GLM = AnswerFormat(
    "glm",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"<tool_call>{NAME}",
            "close": "</tool_call>",
            "content_args": {
                "tag_pattern": rf"<arg_key>{KEY}</arg_key>\s*<arg_value>{VALUE}</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
        }
    ),
    before="<tool_call>NAME\n",
    argument=("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
    behind="</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
SEED = AnswerFormat(
    "seed",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"<seed:tool_call>\s*<function={NAME}>",
            "close_pattern": r"</function>(?:\s*</seed:tool_call>)?",
            "content_args": {"tag_pattern": rf"<parameter={KEY}>{VALUE}</parameter>"},
        },
        reasoning_content=TEXT | {"open": "<seed:think>", "close": "</seed:think>"},
    ),
    before="<seed:tool_call>\n<function=NAME>\n",
    argument=("<parameter=NAME>", "</parameter>\n"),
    behind="</function>\n</seed:tool_call>",
    between="\n",
    trigger="<seed:tool_call>",
    thought=("<seed:think>", "</seed:think>\n"),
)
MINIMAX = AnswerFormat(
    "minimax",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf'(?:<minimax:tool_call>\s*)?<invoke name="{NAME}">',
            "close_pattern": r"</invoke>(?:\s*</minimax:tool_call>)?",
            "content_args": {"tag_pattern": rf'<parameter name="{KEY}">{VALUE}</parameter>'},
        }
    ),
    before='<invoke name="NAME">\n',
    argument=('<parameter name="NAME">', "</parameter>\n"),
    behind="</invoke>\n",
    around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    trigger="<minimax:tool_call>",
)


def _dsml(name: str, section: str) -> AnswerFormat:
    """Return DeepSeek's markup, in which calls stand in a section of this name."""
    opening, closing = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    parameter = rf'<｜DSML｜parameter name="{KEY}" string="(?P<is_text>true|false)">'
    return AnswerFormat(
        name,
        described(
            TAGS_BEHIND_NAME
            | {
                "open_pattern": rf'(?:{opening}\s*)?<｜DSML｜invoke name="{NAME}">',
                "close_pattern": rf"</｜DSML｜invoke>(?:\s*{closing})?",
                "content_args": {
                    "tag_pattern": rf"{parameter}{VALUE}</｜DSML｜parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
            }
        ),
        before='<｜DSML｜invoke name="NAME">\n',
        argument=(
            '<｜DSML｜parameter name="NAME" string="IS_TEXT">',
            "</｜DSML｜parameter>\n",
        ),
        behind="</｜DSML｜invoke>\n",
        around=(opening + "\n", closing),
        trigger=opening,
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
