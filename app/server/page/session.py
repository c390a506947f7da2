"""The server as the window has it: on or off, its address, its key, and what went wrong."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.background import LatestJob
from app.core.engine_client import EngineClient
from app.core.engine_sentences import translated
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from engine import EngineError, one_line

if TYPE_CHECKING:
    from app.server.page.running import RunningServer
    from app.server.request_log import RequestLog, RequestRecord

HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
"""Addresses to listen on: for this machine alone, and for all that can reach it."""

ANY_PAGE = "*"


@dataclass(frozen=True, slots=True)
class ServerChoices:
    """What a person has chosen about the server.

    Attributes:
        port: port to listen on.
        is_on_network: whether other machines can reach it.
        needs_key: whether clients must know a key; always so on a network.
        pages: origins of web pages that may ask; empty for none.
    """

    port: int
    is_on_network: bool
    needs_key: bool
    pages: tuple[str, ...]

    @property
    def host(self) -> str:
        """The address to listen on."""
        return EVERYWHERE if self.is_on_network else HERE


def choices_of(settings: Settings) -> ServerChoices:
    """Return what the settings say about the server."""
    is_on_network = settings.server_on_network
    return ServerChoices(
        settings.server_port,
        is_on_network,
        is_on_network or settings.server_needs_key,
        settings.server_pages if settings.server_for_pages else (),
    )


def read_pages(text: str) -> tuple[str, ...]:
    """Return the origins in a text, divided by commas or spaces.

    Raises:
        EngineError: one of them is no origin.
    """
    return tuple(dict.fromkeys(_origin(word) for word in re.split(r"[\s,;]+", text) if word))


def pages_text(pages: Sequence[str]) -> str:
    """Return origins as a person would type them."""
    return ", ".join(pages)


def _origin(word: str) -> str:
    """Return an origin as browsers send it: without a path, in small letters."""
    if word == ANY_PAGE:
        return word
    try:
        parts = urlsplit(word)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and (parts.port is None or parts.port > 0) and "@" not in parts.netloc
    except ValueError:
        is_good = False
    if not is_good:
        text = tr("“{word}” is not the address of a web page.").format(word=one_line(word, 60))
        raise EngineError(text, tr("Write it as https://example.org or http://localhost:3000."))
    usual = {"http": 80, "https": 443}[parts.scheme]
    port = "" if parts.port in (None, usual) else f":{parts.port}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{port}"


MAX_SHOWN = 200
"""Number of requests that are shown."""


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


ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody's, kept for examples, to which nothing is sent."""


def own_address() -> str:
    """Return the address of this machine in its network; its name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ANYWHERE)  # chooses a network card; sends nothing
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()


KEY_NAME: Final = "server of this window"
"""Name of the server's key among the keys of other servers."""

KEY_BYTES = 24
"""Number of random bytes of a new key."""

KEY_CLOSE_S = 0.5
"""Longest wait for a keyring at the end, in seconds; it may be asking the person something."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a change of the server has come to.

    Attributes:
        number: number of the change.
        address: address of the server; "" if none runs.
        error: why none runs that should; None if that is so.
    """

    number: int
    address: str = ""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class _KeptKey:
    """A key, and whether it is there after a restart."""

    key: str
    is_kept: bool


class ServerSession(QObject):
    """Starts, restarts and ends the server on threads, as the settings say.

    Args:
        keep: uses other settings, and has them written.

    Attributes:
        is_wanted: whether the server is switched on.
        address: its address while it runs, such as "http://127.0.0.1:11435"; else "".
        problem: sentences on why it does not run though it was switched on; else "".
        key: its key; "" until it is known.
        key_problem: sentence on why the key is lost at the end; else "".
    """

    changed = Signal()
    viewed = Signal(object)  # LogView

    def __init__(
        self, client: EngineClient, settings: SettingsStore, keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._sharing, self._settings, self._keep = client.sharing, settings, keep
        self.is_wanted = self._has_begun = self._is_closed = False
        self.address = self.problem = self.key = self.key_problem = ""
        self._running: RunningServer | None = None  # changed by the job alone
        self._n_asked = self._n_done = 0
        self._job = LatestJob("tandem-serving", self)
        self._job.done.connect(self._on_done)
        self._key_job = LatestJob("tandem-server-key", self)
        self._key_job.done.connect(self._on_key)

    @property
    def settings(self) -> Settings:
        """The settings of the window."""
        return self._settings.current

    @property
    def choices(self) -> ServerChoices:
        """The server's settings."""
        return choices_of(self._settings.current)

    @property
    def is_changing(self) -> bool:
        """Whether the server is being started or ended."""
        return self._n_asked != self._n_done or (self.is_wanted and not self.address)

    @Slot()
    def begin(self) -> None:
        """Start it if it starts with the window; does nothing later."""
        if not self._has_begun and self._settings.current.server_at_start:
            self.switch(True)
        self._has_begun = True

    @Slot(bool)
    def switch(self, on: bool) -> None:
        """Start or end the server."""
        self.is_wanted, self.problem = on, ""
        self._apply()

    def change(self, **values: Any) -> None:
        """Change settings of the server, which is started again if it runs."""
        before = self.choices
        self._keep(replace(self._settings.current, **values))
        if self.choices != before:
            if self.choices.needs_key and not self.key:
                self.want_key()
            elif self.is_wanted:
                self._apply()
        self.changed.emit()

    @Slot()
    def want_key(self) -> None:
        """Find the key, or make one if there is none."""
        self._key_job.run(lambda: _kept_key(is_new=False))

    @Slot()
    def renew_key(self) -> None:
        """Make another key; programs that know the old one are refused from then on."""
        self._key_job.run(lambda: _kept_key(is_new=True))

    @Slot()
    def look(self) -> None:
        """Have `viewed` tell what the server does, if it runs."""
        if self._running is not None and self.address:
            self._running.view(self.viewed.emit)

    def close(self) -> None:
        """End the server, and wait for the threads."""
        self._is_closed = True
        self.is_wanted = False
        self._key_job.close(KEY_CLOSE_S)
        self._job.close()
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _apply(self) -> None:
        """Start the server anew, or end it."""
        choices = self.choices if self.is_wanted else None
        if choices is not None and choices.needs_key and not self.key:
            self.want_key()  # which leads back here
        else:
            self._n_asked += 1
            number, key = self._n_asked, self.key if choices and choices.needs_key else ""
            self._job.run(lambda: self._replace(number, choices, key))
        self.changed.emit()

    def _replace(self, number: int, choices: ServerChoices | None, key: str) -> _Outcome:
        """End the server and start another one, if one is wanted; runs on the job's thread."""
        if self._running is not None:
            self._running.stop()
            self._running = None
        if choices is None or self._is_closed:
            return _Outcome(number)
        from app.server.page.running import RunningServer  # late: HTTP takes long to import

        server = RunningServer(self._sharing, choices, key)
        try:
            server.start()
        except EngineError as error:
            return _Outcome(number, error=error)
        self._running = server
        return _Outcome(number, server.address)

    @Slot(object)
    def _on_done(self, outcome: _Outcome) -> None:
        if outcome.number != self._n_asked:
            return
        self._n_done, self.address = outcome.number, outcome.address
        if outcome.error is not None:
            self.is_wanted = False
            hint = tr("Choose another port.")  # the server's own names options of a command
            self.problem = f"{translated(outcome.error.message)} {hint}"
        self.changed.emit()

    @Slot(object)
    def _on_key(self, found: _KeptKey) -> None:
        is_other, self.key = found.key != self.key, found.key
        self.key_problem = (
            "" if found.is_kept else tr("The key cannot be saved. It is lost when Tandem ends.")
        )
        if self.is_wanted and is_other and self.choices.needs_key:
            self._apply()
        self.changed.emit()


def _kept_key(*, is_new: bool) -> _KeptKey:
    """Return the key that is kept, or a new one, which is kept; waits for the keyring."""
    import secrets

    from app.core.system_keyring import SecretStore

    store = SecretStore(paths.api_keys_file())
    key = "" if is_new else store.get(KEY_NAME)
    if key:
        return _KeptKey(key, is_kept=True)
    key = secrets.token_urlsafe(KEY_BYTES)
    return _KeptKey(key, store.put(KEY_NAME, key) != "nowhere")
