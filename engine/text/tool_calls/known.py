"""All known forms of answers.

Sources: the chat templates that the models' files carry, and for gpt-oss OpenAI's description of
the harmony format. Names of functions are found up to 128 characters, so that no text is held back
for long.
"""

from __future__ import annotations

from engine.text.tool_calls.formats.listed import (
    APRIEL,
    COHERE,
    GIGACHAT,
    GRANITE,
    HERMES,
    MISTRAL,
    NEMOTRON,
)
from engine.text.tool_calls.formats.named import (
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTION_GEMMA,
    FUNCTIONARY,
    GEMMA,
    HARMONY,
    KIMI,
    LLAMA,
    MISTRAL_ARGS,
)
from engine.text.tool_calls.formats.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM,
    MINIMAX,
    QWEN_CODER,
    SEED,
)

KNOWN_FORMS = (
    SEED, QWEN_CODER, GLM, MINIMAX, DEEPSEEK_V32, DEEPSEEK_V4, HERMES, MISTRAL, NEMOTRON, APRIEL,
    GRANITE, COHERE, GIGACHAT, MISTRAL_ARGS, HARMONY, DEEPSEEK, DEEPSEEK_V31, KIMI, GEMMA,
    FUNCTION_GEMMA, FUNCTIONARY, LLAMA,
)  # fmt: skip
"""All forms, in the order in which a template's own call is tried with them."""
