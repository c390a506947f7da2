"""Renders conversations as the text a model was trained on, with the Jinja template in its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from engine.errors import TemplateError
from engine.text.sandbox import MAX_SECONDS, BoundedEnvironment, limited

if TYPE_CHECKING:
    from engine.gguf.metadata import Metadata
    from engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_SOURCE = 1 << 20  # characters of a template
KEY = "tokenizer.chat_template"

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content | trim }}
{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""


class Rejected(jinja2.TemplateError):
    """Error of a template that called `raise_exception`."""


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: Jinja source, in Hugging Face's dialect.
        bos_token: text of BOS, "" where the model has none.
        eos_token: text of EOS, "" where the model has none.
        is_fallback: whether the model has no template, so that plain "User: …" text is used.
        max_seconds: longest time that rendering may take.

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
            variables: more template variables, such as enable_thinking=False.

        Raises:
            TemplateError: the template is broken, rejects the conversation, or does not end.
        """
        given = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "documents": None,
            "strftime_now": lambda form: (now or datetime.now()).strftime(form),
            **variables,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(given)
        except Rejected as error:
            raise TemplateError(
                f"The model's chat template rejects this conversation: {error.message}"
            ) from error
        except TemplateError:
            raise
        except Exception as error:  # a template can make Python raise anything
            raise TemplateError(
                f"The model's chat template does not work: {_describe(error)}.",
                "Choose another chat template for this model.",
            ) from error

    def _render(self, given: dict[str, Any]) -> str:
        parts: list[str] = []
        n_chars = 0
        with limited(self._max_seconds) as budget:
            for part in self._template.generate(given):
                parts.append(part)
                n_chars += len(part)
                budget.check_size(n_chars)
        return "".join(parts)

    @cached_property
    def _template(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE:
            raise TemplateError(
                f"The model's chat template has {len(self.source)} characters; "
                f"at most {MAX_SOURCE} are accepted."
            )
        return _environment().from_string(self.source)


def fallback_template(bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """Return the template for models without one of their own."""
    return ChatTemplate(DEFAULT_TEMPLATE, bos_token, eos_token, is_fallback=True)


def chat_template_from_metadata(meta: Metadata, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a model file, or the fallback."""
    bos, eos = (
        "" if token_id is None else tokenizer.token_text(token_id)
        for token_id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    source = meta.str(KEY, "")
    return ChatTemplate(source, bos, eos) if source.strip() else fallback_template(bos, eos)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment({"tojson": _to_json})
    environment.globals["raise_exception"] = _reject
    return environment


def _reject(message: object) -> None:
    raise Rejected(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without Jinja's HTML escapes, which would end up in the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _describe(error: Exception) -> str:
    where = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or calls itself without end"
    return where + (str(error) or type(error).__name__).rstrip(".")
