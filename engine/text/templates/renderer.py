"""Renders chat templates in a child process, which is kept between prompts and can be killed."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from engine.errors import ANOTHER_TEMPLATE, TemplateError
from engine.text.templates.child import TemplateChild, TemplateChildEnded
from engine.text.templates.limits import MAX_REQUEST, MAX_SECONDS, MAX_SOURCE


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
        self,
        source: str,
        given: Mapping[str, Any],
        seconds: float,
        now: datetime | None = None,
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
