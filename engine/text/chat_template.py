"""Renders conversations with the Jinja chat template of a model file.

Rendering happens in a reusable child process (`templates.program`), which can be killed.
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

from engine.errors import ANOTHER_TEMPLATE, Sentence, TemplateError, reason_of
from engine.formats.gguf.reader import GGUFFile
from engine.text.templates.program import GRACE_S, MAX_MEMORY, MAX_REQUEST, MAX_SECONDS, MAX_SOURCE
from engine.text.tokenizer import Tokenizer
from engine.util.programs import program_command
from engine.util.sandbox import ChildEnded, Excess, LimitedChild

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

COMMAND = program_command("engine.text.templates.program")  # command of the child


def _why(ended: ChildEnded, seconds: float) -> Sentence:
    if ended.excess is Excess.TIME:
        return Sentence("it runs for more than {n:g} seconds", n=seconds)
    if ended.is_out_of_memory:
        return Sentence("it needs more than {n} MiB of memory", n=MAX_MEMORY >> 20)
    return Sentence("it crashed its renderer (status {status})", status=str(ended.status))


class TemplateRenderer:
    """Renderer of all templates in a process; thread-safe, one template at a time.

    Nothing is rendered without the child, because untrusted templates never run in this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: LimitedChild | None = None

    def prepare(self, source: str = "") -> None:
        """Start the child if necessary, and compile a template in the background.

        Failures are reported by `render`.
        """
        with self._lock, suppress(OSError):
            self._started()
        compiling = threading.Thread(
            target=self._compile, args=(source,), name="tandem-template", daemon=True
        )
        with suppress(RuntimeError):  # if no thread can be started, the first prompt compiles it
            compiling.start()

    def render(
        self, source: str, variables: Mapping[str, Any], seconds: float, now: datetime | None = None
    ) -> str:
        """Render a template.

        Args:
            source: Jinja source.
            variables: variables for the template, serialisable as JSON.
            seconds: maximum time for compiling and rendering.
            now: current time for the template; None for the actual time.

        Raises:
            TemplateError: the template is broken, rejects the variables, or exceeds a limit.
        """
        request = _request(source, variables, seconds, now)
        with self._lock:
            answer = self._ask(request, seconds)
        if "text" in answer:
            return str(answer["text"])
        if "rejected" in answer:
            raise TemplateError(
                "The model's chat template rejects this conversation: {problem}",
                problem=answer["rejected"],
            )
        raise _not_working(Sentence(answer["broken"], **answer["values"]))

    def close(self) -> None:
        """Stop the child, even while it renders; the next prompt starts another."""
        child = self._child
        if child is not None:
            child.kill()  # the thread that waits for it then releases the lock
        with self._lock:
            self._drop()

    def _compile(self, source: str) -> None:
        with self._lock, suppress(TemplateError, RuntimeError):
            if self._child is not None:
                self._ask(_request(source, None, MAX_SECONDS, None), MAX_SECONDS)

    def _ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        try:
            child = self._started()
            child.wait_until_ready()
            return child.ask(request, seconds + GRACE_S)
        except ChildEnded as error:
            self._drop()
            raise _not_working(_why(error, seconds)) from error
        except OSError as error:
            self._drop()
            raise TemplateError(
                "The program that renders chat templates cannot be started: {problem}.",
                "Allow Tandem to start programs, or use prompts without a chat template.",
                problem=reason_of(error),
            ) from error
        except BaseException:  # e.g. KeyboardInterrupt, after which an answer may still arrive
            self._drop()
            raise

    def _started(self) -> LimitedChild:
        if self._child is not None and not self._child.is_running:
            self._drop()
        if self._child is None:
            self._child = LimitedChild(COMMAND, MAX_MEMORY)
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _request(
    source: str, variables: Mapping[str, Any] | None, seconds: float, now: datetime | None
) -> bytes:
    """Return a request as a line of JSON; if there are no variables, the child only compiles."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            "The model's chat template has {n} characters; at most {most} are accepted.",
            ANOTHER_TEMPLATE,
            n=len(source), most=MAX_SOURCE,
        )  # fmt: skip
    request = {
        "source": source,
        "given": variables,
        "seconds": seconds,
        "now": None if now is None else now.isoformat(),
    }
    try:
        text = json.dumps(request, ensure_ascii=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(
            "The conversation cannot be passed to the chat template: {problem}.", problem=str(error)
        ) from error
    line = (text + "\n").encode("utf-8", "surrogatepass")
    if len(line) > MAX_REQUEST:
        raise TemplateError(
            "The conversation takes {n} bytes; chat templates accept at most {most}.",
            "Shorten the conversation.",
            n=len(line), most=MAX_REQUEST,
        )  # fmt: skip
    return line


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be converted to JSON")


def _not_working(problem: Sentence) -> TemplateError:
    text = "The model's chat template does not work: {problem}."
    return TemplateError(text, ANOTHER_TEMPLATE, problem=problem)


shared_renderer = TemplateRenderer()  # this process's renderer; its child exits with the process

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
        bos_token, eos_token: text of BOS and EOS; "" if the model has none.
        is_fallback: whether the model has no template, so that plain "User: …" text is used.
        max_seconds: maximum time for compiling and rendering.

    Attributes:
        stop_strings: strings that end a reply if no token does.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *,
        is_fallback: bool = False, max_seconds: float = MAX_SECONDS,
    ) -> None:  # fmt: skip
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
            add_generation_prompt: whether to end where the assistant's reply begins.
            now: current time for the template; None for the actual time.
            variables: further template variables, e.g. enable_thinking=False; serialisable as JSON.

        Raises:
            TemplateError: the template is broken, rejects the conversation, or exceeds a limit.
        """
        all_variables = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "documents": None,
            **variables,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return shared_renderer.render(self.source, all_variables, self._max_seconds, now)


def fallback_template(bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """Return the template for models without one."""
    return ChatTemplate(DEFAULT_TEMPLATE, bos_token, eos_token, is_fallback=True)


def chat_template_from_metadata(
    meta: Metadata, tokenizer: Tokenizer, source: str = ""
) -> ChatTemplate:
    """Return the template of a model file (or `source` instead), else the fallback.

    It is compiled in the background, so that the first message need not wait.
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
    """Return the chat template of a GGUF file, or the fallback, without loading its tokenizer.

    Args:
        source: Jinja source to use; "" for the file's.

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
    """Return the tokenizer of a GGUF file, which may contain only a vocabulary.

    Raises:
        ModelFileError: the file cannot be read, or has no supported tokenizer.
    """
    with GGUFFile.open(path) as file:
        return Tokenizer.from_metadata(file.meta)
