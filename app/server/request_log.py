"""Record of the server's requests: those under way, the last ones, and sums of all."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from engine import Finished, PrefillProgress, TokenText

MAX_KEPT = 500
"""Number of ended requests that are kept."""

MAX_CLIENTS = 64
"""Number of clients of which sums are kept; all others are one, `OTHERS`."""

OTHERS = "others"

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
"""Methods that sums name; whatever else clients send is one."""

MAX_TARGET = 120
"""Largest number of characters that are kept of method and path."""

Phase = Literal["waiting", "reading", "writing", "ended"]
"""What a request is doing: waiting for the engine, its prompt or its answer being computed."""


@dataclass(slots=True)
class RequestRecord:
    """A request and what came of it, without its text.

    Attributes:
        number: number of the request, from 1.
        client: address of the client.
        target: method and path, as the client wrote them.
        route: the same as the operation has them; "GET (none)" where there is none.
        began: time when it came, as of `time.time`.
        seconds: how long it took; 0 while it is under way.
        status: HTTP status; 0 before there is one, 499 if the client has gone before.
        n_to_read: number of tokens of the prompt that were not cached, once it is being read.
        n_read: number of these that are computed.
        n_prompt: number of tokens of the prompts of answers that have ended.
        n_cached: number of these that were cached.
        n_drafted: number of tokens that were guessed and checked.
        n_accepted: number of these guesses that were right.
        decode_s: seconds from the first tokens of the answers to their last.
        saved_s: seconds that guesses saved of these; negative where they lost some.
        n_tokens: number of tokens of the answers.
        n_first: number of these that came at once, before their speed could be known.
        first_token_s: seconds to the first of them; 0 before.
        tokens_per_s: speed of the answers, all together; 0 for a single token.
        n_held: bytes of its body.
        problem: sentence with which it failed; "" if it did not.
        start: the same time as `began`, as of `time.perf_counter`.
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
        """Note an event of an answer."""
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
        self.phase = "writing"  # again, where a full context had tokens computed once more
        if not self.n_tokens:
            self.first_token_s, self.n_first = elapsed, n
        self.n_tokens += n
        if elapsed > self.first_token_s:
            later = self.n_tokens - self.n_first
            self.tokens_per_s = later / (elapsed - self.first_token_s)


@dataclass(slots=True)
class Sums:
    """Sums over all requests since the start.

    Attributes:
        requests: number of requests by route and status.
        tokens: number of written tokens by client.
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
    """Requests under way, the last ones and sums of all.

    Attributes:
        running: requests under way, the oldest first.
        ended: the last that ended, the newest last.
        n_held: bytes of the bodies of requests under way.
        on_end: called with each request that has ended; None for nobody.
    """

    def __init__(self) -> None:
        self.running: dict[int, RequestRecord] = {}
        self.ended: deque[RequestRecord] = deque(maxlen=MAX_KEPT)
        self.sums = Sums()
        self.n_held = 0
        self.on_end: Callable[[RequestRecord], None] | None = None
        self._numbers = count(1)

    def begin(self, client: str, method: str, path: str) -> RequestRecord:
        """Note that a request has come, and return what is noted of it."""
        known = method if method in METHODS else "OTHER"
        target = f"{method} {path}"[:MAX_TARGET]
        record = RequestRecord(next(self._numbers), client, target, f"{known} (none)")
        self.running[record.number] = record
        return record

    def hold(self, record: RequestRecord, n: int) -> None:
        """Note that n bytes of a request's body have come."""
        record.n_held += n
        self.n_held += n

    def end(self, record: RequestRecord) -> None:
        """Note that a request has ended."""
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
        """Yield the clients with answers under way, and the tokens per second that they get."""
        found: defaultdict[str, float] = defaultdict(float)
        for record in self.running.values():
            if record.phase == "writing":
                found[self._client(record.client)] += record.tokens_per_s
        yield from found.items()
