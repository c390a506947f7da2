"""What executions of hostile GGUF files have come to, as child processes tell it.

This imports nothing, so that a child without a model starts at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A case with an outcome that no file may have.

    Attributes:
        kind: short text that is the same for cases with the same cause.
        details: traceback or figures.
    """

    number: int
    target: str
    kind: str
    details: str


@dataclass
class Tally:
    """Executions of one target.

    Attributes:
        count: number of executions.
        accepted: number of those in which nothing was wrong with the file.
        seconds: time of all of them, generating the files not included.
        slowest: longest time of one, in seconds.
        slowest_number: number of that one.
    """

    count: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    slowest_number: int = 0

    def add(self, other: "Tally") -> None:
        """Add the executions of another tally."""
        self.count += other.count
        self.accepted += other.accepted
        self.seconds += other.seconds
        if other.slowest > self.slowest:
            self.slowest, self.slowest_number = other.slowest, other.slowest_number
