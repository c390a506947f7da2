"""Snapshot of the server's requests for the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.server.request_log import RequestLog, RequestRecord


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request; see `RequestRecord`.

    Attributes:
        number: id of the request, counting from 1 after each server start.
        route: method and path.
        read_part: fraction of the prompt that has been computed.
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
    """Statistics for a client.

    Attributes:
        tokens_per_s: combined speed of its running answers.
        n_tokens: number of tokens generated in its finished requests.
    """

    client: str
    tokens_per_s: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class LogView:
    """The server's requests and clients.

    Attributes:
        requests: running requests, then finished ones; each group newest first.
        clients: clients with running or finished answers.
    """

    requests: tuple[ShownRequest, ...] = ()
    clients: tuple[ClientSpeed, ...] = ()

    @property
    def n_running(self) -> int:
        """Number of running requests."""
        return sum(request.phase != "ended" for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Combined speed of all running answers."""
        return sum(client.tokens_per_s for client in self.clients)


def view_of(request_log: RequestLog) -> LogView:
    """Take a snapshot; must be called on the server's thread."""
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


MAX_SHOWN = 200  # maximum number of requests in a snapshot
