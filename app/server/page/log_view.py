"""What the window shows of the server's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.server.request_log import RequestLog, RequestRecord


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request as the window shows it.

    Attributes:
        number: number of the request, from 1 with each start of the server.
        began: time when it came, as of `time.time`.
        route: method and path.
        status: HTTP status; 0 before there is one, 499 if the client has gone before.
        phase: "waiting", "reading" or "writing"; "ended" for one that is over.
        read_part: computed part of the prompt while it is being read, from 0 to 1.
        seconds: how long it took; 0 while it is under way.
        problem: sentence with which it failed; "" if it did not.
    """

    number: int
    began: float
    client: str
    route: str
    model: str
    status: int
    phase: str
    read_part: float
    n_prompt: int
    n_tokens: int
    tokens_per_s: float
    first_token_s: float
    seconds: float
    problem: str


@dataclass(frozen=True, slots=True)
class ClientSpeed:
    """A client's figures.

    Attributes:
        tokens_per_s: speed of its running answers, all together; 0 without any.
        n_tokens: number of tokens that it has got, those of running answers not counted.
    """

    client: str
    tokens_per_s: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class LogView:
    """What the server does and has done.

    Attributes:
        requests: requests under way, the newest first, then those that ended, the newest first.
        clients: clients that have got tokens or get some.
    """

    requests: tuple[ShownRequest, ...] = ()
    clients: tuple[ClientSpeed, ...] = ()

    @property
    def n_running(self) -> int:
        """Number of requests under way."""
        return sum(request.phase != "ended" for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Speed of all running answers together."""
        return sum(client.tokens_per_s for client in self.clients)


def view_of(request_log: RequestLog) -> LogView:
    """Return a copy of what there is to show; to be called on the server's thread."""
    running = sorted(request_log.running.values(), key=lambda record: -record.number)
    records = [*running, *reversed(request_log.ended)][:MAX_SHOWN]
    speeds = dict(request_log.clients())
    names = dict.fromkeys([*speeds, *(name for name, _ in request_log.sums.tokens.most_common())])
    clients = (ClientSpeed(n, speeds.get(n, 0.0), request_log.sums.tokens[n]) for n in names)
    return LogView(tuple(map(_shown, records)), tuple(clients))


def _shown(record: RequestRecord) -> ShownRequest:
    return ShownRequest(
        record.number, record.began, record.client, record.route, record.model, record.status,
        record.phase, record.n_read / record.n_to_read if record.n_to_read else 0.0,
        record.n_prompt, record.n_tokens, record.tokens_per_s, record.first_token_s,
        record.seconds, record.problem,
    )  # fmt: skip


MAX_SHOWN = 200
"""Number of requests that are shown."""
