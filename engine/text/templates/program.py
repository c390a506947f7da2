"""The program that renders chat templates: for each line of JSON with a prompt, one of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2

from engine.text.templates.sandbox import BoundedEnvironment, Budget, limited
from engine.util.child_program import answer_lines, ending_after

MAX_SOURCE = 128 << 10
"""Largest number of characters of a template."""

MAX_SECONDS = 2.0
"""Longest time to compile and render a template."""

GRACE_S = 0.25
"""Seconds after that time for the sandbox to stop a template; then its process is killed."""

MAX_MEMORY = 512 << 20
"""Largest number of bytes of memory that a template's process may take."""

MAX_REQUEST = 16 << 20
"""Largest number of bytes of a template and a conversation as JSON."""

MAX_ADDED = 4 << 20
"""Largest number of characters by which a prompt may be longer than the request for it."""


N_KEPT = 4
"""Number of compiled templates that are kept."""

MAX_REASON = 300
"""Longest reason of an error, in characters; templates write some of them."""


class Rejected(jinja2.TemplateError):
    """Error of a template that called `raise_exception`."""


def render(
    source: str,
    given: Mapping[str, Any] | None,
    now: datetime | None,
    seconds: float,
    max_chars: int,
) -> dict[str, str]:
    """Render a template with the variables `given`.

    Args:
        given: variables; None to compile the template alone, for a later prompt.
        now: current time for the template; None for that of the clock.
        seconds: longest time that compiling and rendering may take.
        max_chars: longest result.

    Returns:
        The prompt as "text"; or why the template does not take the conversation as "rejected", or
        what is wrong with the template as "broken".

    Raises:
        MemoryError: the process got no more memory.
    """
    try:
        with limited(seconds) as budget:
            template = _compiled(source)
            if given is None:
                return {"text": ""}
            variables = {"strftime_now": lambda form: (now or datetime.now()).strftime(form)}
            return {"text": _joined(template, variables | dict(given), max_chars, budget)}
    except MemoryError:
        raise
    except Rejected as error:
        return {"rejected": _in_one_line(error.message or "")}
    except Exception as error:  # noqa: BLE001 a template can make Python raise anything
        return {"broken": _in_one_line(_describe(error)).rstrip(".")}


def _joined(
    template: jinja2.Template, variables: dict[str, Any], max_chars: int, budget: Budget
) -> str:
    parts: list[str] = []
    n_chars = 0
    for part in template.generate(variables):
        parts.append(part)
        n_chars += len(part)
        budget.check_size(n_chars, max_chars)
    return "".join(parts)


@lru_cache(N_KEPT)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
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
    return where + (str(error) or type(error).__name__)


def _in_one_line(reason: str) -> str:
    """Return a reason without line breaks, cut where it is too long."""
    line = " ".join(reason[: 2 * MAX_REASON].split())
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"


def _answer(line: bytes) -> dict[str, str]:
    request = json.loads(line)
    now, seconds = request["now"], request["seconds"]
    with ending_after(seconds + 4 * GRACE_S):
        return render(
            request["source"],
            request["given"],
            None if now is None else datetime.fromisoformat(now),
            seconds,
            len(line) + MAX_ADDED,
        )


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
