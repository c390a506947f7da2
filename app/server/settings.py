"""Server settings."""

from __future__ import annotations

from dataclasses import dataclass

from engine import SamplingParams

DEFAULT_PORT = 11435

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerHints:
    """Hints in refusals, for users of the window or of the command line; "" for none.

    Attributes:
        host: for an unknown host name.
        page: for a web page that is not allowed.
        ollama: for requests in Ollama's protocol while it is disabled.
    """

    host: str = ""
    page: str = ""
    ollama: str = ""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: address to listen on; addresses other than loopback require a key.
        port: port to listen on; 0 for any free port.
        key: API key that clients must send, or "".
        origins: web page origins to allow, such as "http://localhost:3000", or "*".
        hosts: additional host names for this machine.
        aliases: additional names for the model.
        sampling: default sampling parameters.
        most_running: maximum number of concurrent answers.
        most_waiting: maximum number of queued answers; further requests are refused.
        most_body: maximum size of a request in bytes, without images.
        most_pictures: maximum size of a request's images in bytes.
        most_bodies: total size of running requests, in bytes, above which large ones are refused.
        most_read_s: timeout for receiving a request.
        most_answer_s: timeout for an answer, which is then cut off.
        ping_s: interval in seconds between pings while a stream is silent.
        logs_prompts: whether prompts are logged.
        has_ollama: whether Ollama's protocol is enabled.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    key: str = ""
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 frozen, so one shared default is safe
    most_running: int = 16
    most_waiting: int = 64
    most_body: int = 8 * MIB
    most_pictures: int = 64 * MIB
    most_bodies: int = 256 * MIB
    most_read_s: float = 30.0
    most_answer_s: float = 3600.0
    ping_s: float = 15.0
    logs_prompts: bool = False
    has_ollama: bool = False
    hints: ServerHints = ServerHints()
