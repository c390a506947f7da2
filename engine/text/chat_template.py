"""Renders conversations as the text a model was trained on, with the Jinja template in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.formats.gguf.reader import GGUFFile
from engine.text.templates.program import MAX_SECONDS
from engine.text.templates.renderer import shared_renderer
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

Message = Mapping[str, Any]

KEY = "tokenizer.chat_template"

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content | trim }}
{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: Jinja source, in Hugging Face's dialect.
        bos_token: text of BOS, "" where the model has none.
        eos_token: text of EOS, "" where the model has none.
        is_fallback: whether the model has no template, so that plain "User: …" text is used.
        max_seconds: longest time that compiling and rendering may take.

    Attributes:
        stop_strings: strings at which to cut a reply, as no token of the model ends it.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        is_fallback: bool = False,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.is_fallback = is_fallback
        self.stop_strings = ("\nUser:",) if is_fallback else ()
        self._max_seconds = max_seconds

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
            messages: messages {"role": …, "content": …}, oldest first.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: whether to end where the assistant begins to speak.
            now: current time for the template; None for that of the clock.
            variables: more template variables, such as enable_thinking=False; for JSON.

        Raises:
            TemplateError: the template is broken, rejects the conversation, or takes too much time
                or memory.
        """
        given = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "documents": None,
            **variables,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return shared_renderer.render(self.source, given, self._max_seconds, now)


def fallback_template(bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """Return the template for models without one of their own."""
    return ChatTemplate(DEFAULT_TEMPLATE, bos_token, eos_token, is_fallback=True)


def chat_template_from_metadata(
    meta: Metadata, tokenizer: Tokenizer, source: str = ""
) -> ChatTemplate:
    """Return the template of a model file, or the fallback.

    The process that will render it starts and compiles it meanwhile, so that the first message need
    not wait.

    Args:
        source: Jinja source to use in place of the file's; "" for that.
    """
    bos, eos = (
        "" if token_id is None else tokenizer.token_text(token_id)
        for token_id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    source = source or meta.str(KEY, "")
    template = ChatTemplate(source, bos, eos) if source.strip() else fallback_template(bos, eos)
    shared_renderer.prepare(template.source)
    return template


TOKENS = "tokenizer.ggml."


def load_chat_template(path: str | Path, source: str = "") -> ChatTemplate:
    """Return the chat template of a GGUF file, or the plain one, without its tokenizer.

    Args:
        source: Jinja source to use in place of the file's; "" for that.

    Raises:
        ModelFileError: the file cannot be read.
    """
    with GGUFFile.open(path) as file:
        meta = file.meta
        tokens = meta.strs(TOKENS + "tokens") if TOKENS + "tokens" in meta else ()
        spelling = []
        for name in ("bos", "eos"):
            number = meta.int(f"{TOKENS}{name}_token_id", -1)
            spelling.append(tokens[number] if 0 <= number < len(tokens) else "")
        source = source or meta.str(KEY, "")
    return ChatTemplate(source, *spelling) if source.strip() else fallback_template(*spelling)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file: of a model, or of a vocabulary alone.

    Raises:
        ModelFileError: the file cannot be read, or has no supported tokenizer.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
