"""The program that renders chat templates: reads requests as lines of JSON, and writes results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2

from engine.text.templates.sandbox import BoundedEnvironment, Budget, SandboxError, limited
from engine.util.child_program import answer_lines, ending_after

MAX_SOURCE = 128 << 10  # maximum number of characters in a template
MAX_SECONDS = 2.0  # maximum time to compile and render a template
GRACE_S = 0.25  # additional seconds for the sandbox to stop a template before its process is killed
MAX_MEMORY = 512 << 20  # maximum memory of a template's process, in bytes
MAX_REQUEST = 16 << 20  # maximum bytes of a template and a conversation as JSON
MAX_ADDED = 4 << 20  # maximum number of characters by which a prompt may exceed its request

MAX_COMPILED = 4  # maximum number of cached templates
MAX_REASON = 300  # maximum length of an error message, which a template may have written


class Rejected(jinja2.TemplateError):
    """Error for a template that called `raise_exception`."""


def render(
    source: str, given: Mapping[str, Any] | None, now: datetime | None, seconds: float,
    max_chars: int,
) -> dict[str, object]:  # fmt: skip
    """Render a template with the variables `given`.

    Args:
        given: variables; None to only compile the template, for a later prompt.
        now: current time for the template; None for the actual time.
        seconds: maximum time for compiling and rendering.
        max_chars: maximum length of the result.

    Returns:
        The prompt as "text"; or the template's reason for rejecting the conversation as "rejected";
        or "broken" and "values", a template for a sentence about the error and its values.

    Raises:
        MemoryError: the process ran out of memory.
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
        problem = _describe(error)
        return {"broken": _in_one_line(problem.template).rstrip("."), "values": problem.values}


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


@lru_cache(MAX_COMPILED)
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
    value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return `value` as JSON without Jinja's HTML escapes, which do not belong in a prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _describe(error: Exception) -> SandboxError:
    if isinstance(error, RecursionError):
        return SandboxError("it is nested too deeply or recurses endlessly")
    if isinstance(error, SandboxError):
        return error
    where = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return SandboxError(where + (str(error) or type(error).__name__))


def _in_one_line(reason: str) -> str:
    line = " ".join(reason[: 2 * MAX_REASON].split())
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"


def _answer(line: bytes) -> dict[str, object]:
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
