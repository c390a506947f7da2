"""Renders conversations as the text a model was trained on, with the Jinja template in its file.

A child process renders (`templates.program`), which is kept between prompts and can be killed.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ANOTHER_TEMPLATE, TemplateError
from engine.formats.gguf.reader import GGUFFile
from engine.text.templates.program import GRACE_S, MAX_MEMORY, MAX_REQUEST, MAX_SECONDS, MAX_SOURCE
from engine.text.tokenizer import Tokenizer
from engine.util.programs import program_command
from engine.util.progress import IsCancelled, never
from engine.util.sandbox import ChildEnded, Excess, LimitedChild

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

COMMAND = program_command("engine.text.templates.program")
"""Command of the child."""

NEEDS_MEMORY = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"


class TemplateChildEnded(Exception):
    """End of the child without an answer; the text says why, where "it" is the template."""


class TemplateChild(LimitedChild):
    """A process that renders one prompt after another, for one thread at a time.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        super().__init__(COMMAND, MAX_MEMORY)  # ready in 20 s, also where a model is being loaded

    def ask(
        self, request: bytes, seconds: float, is_cancelled: IsCancelled = never
    ) -> dict[str, Any]:
        """Return the answer to a request, a line of JSON.

        Args:
            seconds: time for compiling and rendering.
            is_cancelled: returning True ends the child.

        Raises:
            TemplateChildEnded: there is no answer, and the child is gone or going.
        """
        try:
            return super().ask(request, seconds + GRACE_S, is_cancelled)
        except ChildEnded as error:
            raise TemplateChildEnded(_why(error, seconds)) from error


def _why(ended: ChildEnded, seconds: float) -> str:
    if ended.excess is Excess.TIME:
        return f"it runs for more than {seconds:g} seconds"
    if ended.is_out_of_memory:
        return NEEDS_MEMORY
    return f"it ends the program that renders it, with status {ended.status}"


class TemplateRenderer:
    """Renderer of all templates of a process; threads may share it and are served in turn.

    Where the child cannot be started, nothing is rendered: what must not be able to hang this
    process is never run in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: TemplateChild | None = None

    def prepare(self, source: str = "") -> None:
        """Start the child if there is none, and have it compile a template, without waiting for it.

        Rendering reports failures of either.
        """
        with self._lock, suppress(OSError):
            self._started()
        compiling = threading.Thread(
            target=self._compile, args=(source,), name="tandem-template", daemon=True
        )
        with suppress(RuntimeError):  # no thread can be started; the first prompt compiles then
            compiling.start()

    def render(
        self, source: str, given: Mapping[str, Any], seconds: float, now: datetime | None = None
    ) -> str:
        """Return what a template makes of variables.

        Args:
            source: Jinja source.
            given: variables of the template, for JSON.
            seconds: longest time for compiling and rendering.
            now: current time for the template; None for that of the clock.

        Raises:
            TemplateError: the template is broken, rejects the variables, or uses too much.
        """
        request = _request(source, given, seconds, now)
        with self._lock:
            answer = self._ask(request, seconds)
        if "text" in answer:
            return str(answer["text"])
        if "rejected" in answer:
            raise TemplateError(
                f"The model's chat template rejects this conversation: {answer['rejected']}"
            )
        raise _not_working(answer["broken"])

    def close(self) -> None:
        """End the child, also in the middle of a template; the next prompt starts another."""
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer gets none, and gives the lock free
        with self._lock:
            self._drop()

    def _compile(self, source: str) -> None:
        """Have the child compile a template, if it is there; runs on a thread of its own."""
        with self._lock, suppress(TemplateError, RuntimeError):
            if self._child is not None:
                self._ask(_request(source, None, MAX_SECONDS, None), MAX_SECONDS)

    def _ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        try:
            child = self._started()
            child.wait_until_ready()
            return child.ask(request, seconds)
        except TemplateChildEnded as error:
            self._drop()
            raise _not_working(str(error)) from error
        except OSError as error:
            self._drop()
            raise TemplateError(
                f"The program that renders chat templates cannot be started: {error}.",
                "Let Tandem start programs, or use prompts without a chat template.",
            ) from error
        except BaseException:  # such as Ctrl+C: an answer may be on its way
            self._drop()
            raise

    def _started(self) -> TemplateChild:
        if self._child is not None and not self._child.is_running:
            self._drop()
        if self._child is None:
            self._child = TemplateChild()
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _request(
    source: str, given: Mapping[str, Any] | None, seconds: float, now: datetime | None
) -> bytes:
    """Return a request as a line of JSON; without variables it is one to compile alone.

    Raises:
        TemplateError: the template or the conversation is too long or is not for JSON.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"The model's chat template has {len(source)} characters; "
            f"at most {MAX_SOURCE} are accepted.",
            ANOTHER_TEMPLATE,
        )
    request = {
        "source": source,
        "given": given,
        "seconds": seconds,
        "now": None if now is None else now.isoformat(),
    }
    try:
        text = json.dumps(request, ensure_ascii=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"This conversation cannot be given to a template: {error}.") from error
    line = (text + "\n").encode("utf-8", "surrogatepass")
    if len(line) > MAX_REQUEST:
        raise TemplateError(
            f"The conversation takes {len(line)} bytes; chat templates get at most {MAX_REQUEST}.",
            "Shorten the conversation.",
        )
    return line


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _not_working(problem: str) -> TemplateError:
    return TemplateError(f"The model's chat template does not work: {problem}.", ANOTHER_TEMPLATE)


shared_renderer = TemplateRenderer()
"""The renderer of this process, whose child ends with it."""

atexit.register(shared_renderer.close)


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
