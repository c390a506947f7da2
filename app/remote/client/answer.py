"""The chunks of a streamed answer, as the engine's events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.core.translation import tr
from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection, error_text
from engine import (
    AnswerPart,
    EngineError,
    Event,
    Finished,
    FinishReason,
    Generate,
    ThoughtMarker,
    Timings,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Usage,
)

UNKNOWN_TOKEN: Final = -1
"""Id of each token of a remote answer, as servers do not tell any."""

MOST_TEXT: Final = 16 << 20
"""Largest number of characters of an answer."""

DONE: Final = "[DONE]"

REASONS: Final[Mapping[str, FinishReason]] = {"length": "length"}
"""Our name of the reasons for which an answer ends; all others are an end of the model's own."""

LEAST_S: Final = 0.05
"""Seconds of text below which its speed is unknown: it has come at once."""

MOST_COUNT: Final = 1 << 40


class AnswerReader:
    """Reader of a streamed answer, with what has come of it so far.

    Args:
        command: the request; `in_parts` says how a thought is told.
        host: name of the server, for sentences.

    Attributes:
        is_complete: whether the server has said that the answer ends.
        is_over: whether nothing follows any more.
    """

    def __init__(self, command: Generate, host: str) -> None:
        self._in_parts, self._host = command.in_parts, host
        self._asked_at = time.perf_counter()
        self._first_at = self._last_at = 0.0
        self._n_chunks = self._n_characters = 0
        self._marker = ThoughtMarker()
        self._usage: Usage | None = None
        self._reason: FinishReason = "stop"
        self._calls: dict[int, list[str]] = {}  # arguments of the calls that have begun
        self._n_ended = 0
        self.is_complete = self.is_over = False

    def read(self, data: str) -> Iterator[Event]:
        """Yield the events of one chunk.

        Raises:
            EngineError: it is an error of the server, or not understood.
        """
        if data.strip() == DONE:
            self.is_complete = self.is_over = True
            return
        if not data.strip():
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise self._not_understood() from None
        if not isinstance(chunk, dict):
            raise self._not_understood()
        if chunk.get("error"):
            said = error_text(chunk)
            text = tr("{host} has ended the answer with an error.").format(host=self._host)
            raise EngineError(f"{text} {said}".strip())
        self._note_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            yield from self._read_choice(choices[0])

    def finish(self) -> Iterator[Event]:
        """Yield the last events of an answer that the server has ended."""
        if closing := self._marker.closed():
            yield TokenText(closing, ())
        yield from self._end_call(is_cut=self._reason != "stop")
        yield self.finished(self._reason)

    def finished(self, reason: FinishReason) -> Finished:
        """Return the closing event of an answer that ends here for a reason."""
        return Finished(reason, self._counted(), self._timings())

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or choice.get("message") or choice
        if not isinstance(delta, dict):
            raise self._not_understood()
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield from self._tell(thought, "reasoning")
        text = delta.get("content") or (delta.get("text") if delta is choice else None)
        if isinstance(text, str) and text:
            yield from self._tell(text, "content")
        yield from self._read_calls(delta.get("tool_calls"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason, self.is_complete = REASONS.get(reason, "stop"), True

    def _tell(self, text: str, part: AnswerPart) -> Iterator[Event]:
        """Yield a text; where the answer does not come in parts, thoughts have marks around."""
        self._count(len(text))
        text = text.encode("utf-8", "replace").decode("utf-8")  # halves of pairs cannot be saved
        ids = (UNKNOWN_TOKEN,)
        if self._in_parts:
            yield TokenText(text, ids, part)
        else:
            yield TokenText(self._marker.written(text, is_thought=part == "reasoning"), ids)

    def _count(self, n_characters: int) -> None:
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._n_chunks += 1
        self._n_characters += n_characters
        if self._n_characters > MOST_TEXT:
            text = tr("The answer of {host} does not end, so it was stopped.")
            raise EngineError(text.format(host=self._host))

    def _read_calls(self, calls: object) -> Iterator[Event]:
        """Yield the events of calls of functions, which come in pieces."""
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
                continue
            index, function = _count_of(call.get("index", place)), call["function"]
            if index not in self._calls:
                yield from self._end_call()
                self._calls[index] = []
                self._count(0)
                name = str(function.get("name") or "")
                yield ToolCallBegun(index, str(call.get("id") or f"call_{index}"), name)
            arguments = function.get("arguments")
            if isinstance(arguments, str) and arguments:
                self._count(len(arguments))
                self._calls[index].append(arguments)
                yield ToolCallText(index, arguments)

    def _end_call(self, *, is_cut: bool = False) -> Iterator[Event]:
        """Yield `ToolCallEnded` for the last call, unless it was yielded before.

        Args:
            is_cut: whether the answer was cut off: some servers close the arguments then.
        """
        if self._n_ended < len(self._calls):
            self._n_ended = len(self._calls)
            index = [*self._calls][-1]
            is_object = _is_object("".join(self._calls[index]) or "{}")
            yield ToolCallEnded(index, is_object and not is_cut)

    def _note_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        read, written = (
            details if isinstance(details := usage.get(name), dict) else {}
            for name in ("prompt_tokens_details", "completion_tokens_details")
        )
        n_right = _count_of(written.get("accepted_prediction_tokens"))
        self._usage = Usage(
            _count_of(usage.get("prompt_tokens")),
            _count_of(read.get("cached_tokens")),
            _count_of(usage.get("completion_tokens")),
            n_right + _count_of(written.get("rejected_prediction_tokens")),
            n_right,
        )

    def _counted(self) -> Usage:
        """Return the numbers of tokens; one for each chunk where the server does not tell them."""
        return self._usage or Usage(completion_tokens=self._n_chunks)

    def _timings(self) -> Timings:
        """Return the times as they were seen here, with those of network and queue."""
        if not self._first_at:
            return Timings()
        usage = self._counted()
        first_s, decode_s = self._first_at - self._asked_at, self._last_at - self._first_at
        n_read = max(0, usage.prompt_tokens - usage.cached_tokens)
        n_later = max(0, usage.completion_tokens - 1)
        return Timings(
            prompt_s=first_s,
            decode_s=decode_s,
            first_token_s=first_s,
            prompt_per_s=n_read / first_s if first_s else 0.0,
            decode_per_s=n_later / decode_s if decode_s > LEAST_S else 0.0,
        )

    def _not_understood(self) -> EngineError:
        text = tr("The answer of {host} is not understood.").format(host=self._host)
        return EngineError(text, tr("Check that the address is one of OpenAI's interface."))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _count_of(value: object) -> int:
    """Return a number of tokens as a server tells it; 0 for what is none."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_COUNT
    return int(value) if is_count else 0  # type: ignore[call-overload]


MOST_LINES = 20_000


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of a server at one moment.

    Attributes:
        tokens_per_s: speed of all answers together.
        n_running, n_waiting: answers that are computed, and that wait for that.
        kv_used, kv_room: tokens in the KV cache, and those for which it has room; None where the
            server does not tell.
    """

    tokens_per_s: float = 0.0
    n_running: int = 0
    n_waiting: int = 0
    kv_used: int | None = None
    kv_room: int | None = None


def read_figures(address: RemoteAddress, connection: Connection) -> ServerFigures:
    """Return the present figures of a server.

    Raises:
        EngineError: it cannot be asked.
    """
    text = connection.read(f"{address.root}/metrics").decode("utf-8", "replace")
    return parse_figures(text)


def parse_figures(text: str) -> ServerFigures:
    """Return the figures in a text; those that it lacks are 0 or None."""
    values: dict[str, float] = {}
    for line in text.splitlines()[:MOST_LINES]:
        name, _, value = line.strip().rpartition(" ")
        if not name or name.startswith("#"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and 0 <= number < 1e15:
            values[name] = number
    used, room = values.get("tandem_kv_cache_used_tokens"), values.get("tandem_kv_cache_tokens")
    return ServerFigures(
        values.get("tandem_completion_tokens_per_second", 0.0),
        int(values.get("tandem_answers_running", 0)),
        int(values.get("tandem_answers_waiting", 0)),
        None if used is None else int(used),
        None if room is None else int(room),
    )
