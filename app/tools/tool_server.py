"""A server of tools, as a person has set it up, and what it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LONGEST_NAME: Final = 64

MAX_MESSAGE: Final = 8 << 20
"""Size of the largest message of a server, in bytes or characters."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A program, or an address, that offers tools by the Model Context Protocol.

    Attributes:
        name: what the person calls it; no two have one name.
        command: program and its arguments; () for a server at an address.
        environment: variables of the program, beside the few that it gets anyhow.
        folder: where the program runs; "" for the folder that the app runs in.
        url: address; "" for a program.
        headers: what each request to the address has; "" stands for a value that is kept as a
            secret.
        is_on: whether it is used.
        hidden: names of its tools that models are not told of.
    """

    name: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_on: bool = True
    hidden: tuple[str, ...] = ()

    def connects_like(self, other: ToolServer) -> bool:
        """Return whether a connection to one is a connection to the other."""
        return (self.command, self.environment, self.folder, self.url, self.headers) == (
            other.command, other.environment, other.folder, other.url, other.headers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits for one server.

    Attributes:
        start_s: seconds in which a server must have listed its tools; programs may have to be
            fetched first.
        silence_s: seconds of a call without a sign of progress.
        most_result: size limit of a result, in characters.
        most_tools: number of tools beyond which no more are read.
    """

    start_s: float = 90.0
    silence_s: float = 300.0
    most_result: int = 256 << 10
    most_tools: int = 1000
