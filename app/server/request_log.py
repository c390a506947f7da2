"""Record of requests: running ones, recent ones, and totals."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from engine import Finished, PrefillProgress, TokenText

MAX_KEPT = 500  # maximum number of finished requests kept
MAX_CLIENTS = 64
"""Maximum number of clients with their own totals; all others are counted as `OTHERS`."""

OTHERS = "others"

METHODS = ("GET", "HEAD", "POST", "OPTIONS")  # HTTP methods that are counted by name
MAX_TARGET = 120  # maximum length of the logged method and path
Phase = Literal["waiting", "reading", "writing", "ended"]
"""State of a request: queued, prefill, decode, finished."""


@dataclass(slots=True)
class RequestRecord:
    """A request and its statistics, without its text.

    Attributes:
        number: id of the request, counting from 1.
        client: address of the client.
        target: method and path as sent.
        route: method and path of the operation; "GET (none)" if no operation matches.
        began: start time, by `time.time`.
        seconds: total duration; 0 while it is running.
        status: HTTP status; 0 before there is one, 499 if the client disconnected.
        n_to_read, n_read: uncached prompt tokens, and how many have been computed.
        n_prompt, n_cached: prompt tokens of finished answers, and how many were cached.
        n_drafted, n_accepted: draft tokens, and how many were accepted.
        decode_s: total decode time for the answers.
        saved_s: seconds that draft tokens saved; negative if they cost time.
        n_tokens: number of generated tokens.
        n_first: tokens in the first event, which say nothing about the speed.
        first_token_s: time to first token; 0 until then.
        tokens_per_s: combined speed of all answers; 0 while unknown.
        n_held: size of its body in bytes.
        problem: error message, or "".
        start: start time, by `time.perf_counter`.
    """

    number: int
    client: str
    target: str
    route: str
    began: float = field(default_factory=time.time)
    model: str = ""
    phase: Phase = "waiting"
    status: int = 0
    n_to_read: int = 0
    n_read: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    decode_s: float = 0.0
    saved_s: float = 0.0
    n_tokens: int = 0
    n_first: int = 0
    seconds: float = 0.0
    first_token_s: float = 0.0
    tokens_per_s: float = 0.0
    n_held: int = 0
    problem: str = ""
    start: float = field(default_factory=time.perf_counter)

    def note(self, event: object) -> None:
        """Record an answer's event."""
        if isinstance(event, PrefillProgress):
            self.phase, self.n_read, self.n_to_read = "reading", event.done, event.total
        elif isinstance(event, TokenText):
            self._note_tokens(len(event.ids))
        elif isinstance(event, Finished):
            self.n_prompt += event.usage.prompt_tokens
            self.n_cached += event.usage.cached_tokens
            self.n_drafted += event.usage.n_drafted
            self.n_accepted += event.usage.n_accepted
            self.decode_s += event.timings.decode_s
            self.saved_s += event.timings.saved_s

    def _note_tokens(self, n: int) -> None:
        elapsed = time.perf_counter() - self.start
        self.phase = "writing"  # even if a context shift has just recomputed tokens
        if not self.n_tokens:
            self.first_token_s, self.n_first = elapsed, n
        self.n_tokens += n
        if elapsed > self.first_token_s:
            later = self.n_tokens - self.n_first
            self.tokens_per_s = later / (elapsed - self.first_token_s)


@dataclass(slots=True)
class Sums:
    """Totals over all requests.

    Attributes:
        requests: number of requests by route and status.
        tokens: number of generated tokens by client.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    n_prompt: int = 0
    n_cached: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    decode_s: float = 0.0
    saved_s: float = 0.0
    n_tokens: int = 0
    seconds: float = 0.0
    first_token_s: float = 0.0
    n_answered: int = 0


class RequestLog:
    """Running and recent requests, and totals.

    Attributes:
        running: running requests, oldest first.
        ended: recently finished requests, newest last.
        n_held: total size of running requests' bodies in bytes.
        on_end: called with each finished request.
    """

    def __init__(self) -> None:
        self.running: dict[int, RequestRecord] = {}
        self.ended: deque[RequestRecord] = deque(maxlen=MAX_KEPT)
        self.sums = Sums()
        self.n_held = 0
        self.on_end: Callable[[RequestRecord], None] | None = None
        self._numbers = count(1)

    def begin(self, client: str, method: str, path: str) -> RequestRecord:
        """Record the start of a request."""
        known = method if method in METHODS else "OTHER"
        target = f"{method} {path}"[:MAX_TARGET]
        record = RequestRecord(next(self._numbers), client, target, f"{known} (none)")
        self.running[record.number] = record
        return record

    def hold(self, record: RequestRecord, n: int) -> None:
        """Record `n` more bytes in a request's body."""
        record.n_held += n
        self.n_held += n

    def end(self, record: RequestRecord) -> None:
        """Record the end of a request."""
        self.n_held -= record.n_held
        record.phase = "ended"
        record.seconds = time.perf_counter() - record.start
        del self.running[record.number]
        self.ended.append(record)
        sums = self.sums
        sums.requests[record.route, record.status] += 1
        sums.seconds += record.seconds
        sums.n_prompt += record.n_prompt
        sums.n_cached += record.n_cached
        sums.n_drafted += record.n_drafted
        sums.n_accepted += record.n_accepted
        sums.decode_s += record.decode_s
        sums.saved_s += record.saved_s
        if record.n_tokens:
            sums.n_tokens += record.n_tokens
            sums.first_token_s += record.first_token_s
            sums.n_answered += 1
            sums.tokens[self._client(record.client)] += record.n_tokens
        if self.on_end is not None:
            self.on_end(record)

    def _client(self, client: str) -> str:
        known = self.sums.tokens
        return client if client in known or len(known) < MAX_CLIENTS else OTHERS

    def clients(self) -> Iterator[tuple[str, float]]:
        """Yield each client whose answers are being generated, with its tokens per second."""
        speeds: defaultdict[str, float] = defaultdict(float)
        for record in self.running.values():
            if record.phase == "writing":
                speeds[self._client(record.client)] += record.tokens_per_s
        yield from speeds.items()
