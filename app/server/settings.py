"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass

from engine import SamplingParams

DEFAULT_PORT = 11435

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerHints:
    """What to do about a refusal, in the words of whoever runs the server; "" for nothing.

    Attributes:
        host: about a name of this machine that is not known.
        page: about a web page that may not ask.
        ollama: about Ollama's protocol, where it is not served.
    """

    host: str = ""
    page: str = ""
    ollama: str = ""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server: where it listens, who may ask, and how much.

    Attributes:
        host: address to listen on; all but those of this machine alone need a key.
        port: 0 for any that is free.
        key: what clients must know; "" for nothing.
        origins: origins of web pages that may ask, such as "http://localhost:3000"; "*" for all.
        hosts: names under which clients may reach it, beside those of this machine.
        aliases: further names of the model.
        sampling: what holds where a request says nothing.
        most_running: number of answers that the engine has at once.
        most_waiting: number of answers that wait before it, beyond which requests are refused.
        most_body: bytes of the largest request, pictures not counted.
        most_pictures: bytes that its pictures may have beside, where it may have any.
        most_bodies: bytes of all requests under way, beyond which large ones are refused.
        most_read_s: seconds in which a request must have come.
        most_answer_s: seconds after which an answer is ended where it is.
        ping_s: interval, in seconds, of signs of life while a stream has nothing to say.
        logs_prompts: whether the log has what is asked.
        has_ollama: whether programs that know only Ollama's protocol may ask, too.
        hints: what refusals say that can be done.
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
