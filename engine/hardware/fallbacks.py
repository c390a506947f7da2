"""Slower methods that GPUs fall back to, and the lists in which models and the process keep them.

Anything that makes a GPU slower than it could be is reported here with its reason, to be shown in
the window, in `Model.warnings` and next to each measured speed. Imports no torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import Sentence, clause, listed

FallbackKind = Literal[
    "kernels", "weights", "operations", "graph", "exchange", "sampling", "copies", "memory",
    "compiling", "launcher", "wrong", "draft", "pictures", "machines",
]  # fmt: skip
"""Kinds of fallbacks. "kernels": PyTorch computes everything. "weights": PyTorch computes some of
the products. "operations": PyTorch computes operations without a kernel. "graph": kernels are
launched one by one. "exchange": the host takes part in exchanges between GPUs. "sampling": the host
samples tokens. "copies": large values are copied, not sent by NCCL. "memory": host memory could not
be pinned. "compiling": compiled kernels are not cached. "launcher": kernels are launched by Tandem,
not by Triton's launcher. "wrong": some kernels failed a check during loading, and slower ones or
PyTorch are used instead. "draft": the draft model has failed, on any device. "pictures": the vision
encoder could not be loaded again after a re-split. "machines": values go through host memory
between machines."""

MAX_REASON = 300
"""Maximum length of a reason, in characters; drivers and compilers can be verbose."""


class _Words(NamedTuple):
    title: Sentence
    cost: Sentence
    help: Sentence


_AGAIN = Sentence("Load the model again; if this recurs, a newer driver may help.")

_NEWER = Sentence("A newer driver, PyTorch or Triton may help.")

_RELOAD = Sentence("Load the model again to restore it.")

_SLOWER = Sentence("Prompt processing and token generation are slower.")

_SLOW_TOKENS = Sentence("Token generation is slower.")

_WORDS: dict[FallbackKind, _Words] = {
    "kernels": _Words(
        Sentence("On {devices}, PyTorch computes instead of Tandem's kernels"),
        Sentence("Prompt processing and token generation are much slower."), _NEWER,
    ),
    "weights": _Words(
        Sentence("On {devices}, PyTorch computes with some of the weights"), _SLOWER, _NEWER
    ),
    "operations": _Words(
        Sentence("On {devices}, PyTorch computes some operations of this model"), _SLOWER,
        Sentence("Please report the model so that kernels can be added for it."),
    ),
    "wrong": _Words(
        Sentence("On {devices}, some kernels are not used"),
        Sentence("Prompt processing or token generation may be slower."), _NEWER,
    ),
    "graph": _Words(
        Sentence("On {devices}, kernels are launched one by one"), _SLOW_TOKENS, _AGAIN
    ),
    "exchange": _Words(
        Sentence("Between {devices}, the CPU takes part in each exchange"), _SLOW_TOKENS, _AGAIN
    ),
    "sampling": _Words(
        Sentence("Tokens are sampled on the CPU, not on {devices}"), _SLOW_TOKENS, _AGAIN
    ),
    "copies": _Words(
        Sentence("Between {devices}, NCCL is not used"), Sentence("Prompt processing is"
            " slower."), _AGAIN
    ),
    "memory": _Words(
        Sentence("Copies to and from {devices} need the CPU's help"),
        Sentence("Loading and prompt processing are slower."),
        Sentence("Close other programs, or allow more locked memory (ulimit -l)."),
    ),
    "compiling": _Words(
        Sentence("GPU kernels are compiled again at each start"),
        Sentence("Loading is slower."),
        Sentence("Set TANDEM_KERNEL_CACHE to a folder with free space that only you can write to."),
    ),
    "launcher": _Words(
        Sentence("Kernels are launched without Triton's own launcher"),
        Sentence("Prompt processing may be slower."),
        Sentence("Install gcc and Python's headers (python3-dev)."),
    ),
    "draft": _Words(
        Sentence("The draft model on {devices} has stopped working"),
        Sentence("Answers continue without its draft tokens."), _RELOAD,
    ),
    "pictures": _Words(
        Sentence("The vision encoder is not loaded on {devices}"),
        Sentence("The model cannot see new images."), _RELOAD,
    ),
    "machines": _Words(
        Sentence("Between the machines, NCCL is not used"),
        Sentence("Prompt processing, and token generation with a tensor split, may be slower."),
        Sentence(
            "The page on several machines lists what to check; --machine-link gloo avoids NCCL."
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fallback:
    """A slower method that GPUs use, with the reason.

    Attributes:
        devices: ids of the affected devices; empty for all GPUs in this machine.
        why: reason as the end of a sentence, on one line.
        help: sentence with a remedy; the default depends on the kind.
    """

    kind: FallbackKind
    devices: tuple[str, ...]
    why: str
    help: str = ""

    def __post_init__(self) -> None:
        why = clause(self.why)
        line = next(iter(why.strip().splitlines()), "").strip()[:MAX_REASON]
        plain = re.sub(r"[.\s]+$", "", line) or Sentence("the reason is unknown")
        object.__setattr__(self, "why", why if why == plain else plain)  # a `Sentence` stays one
        object.__setattr__(self, "devices", tuple(dict.fromkeys(self.devices)))
        object.__setattr__(self, "help", self.help or _WORDS[self.kind].help)

    @property
    def title(self) -> Sentence:
        """Title of the fallback, such as "On cuda:0, kernels are launched one by one"."""
        devices = listed(self.devices or [Sentence("all GPUs")])
        return Sentence(_WORDS[self.kind].title.template, devices=devices)

    @property
    def cost(self) -> Sentence:
        """Sentence about the loss of speed."""
        return _WORDS[self.kind].cost

    @property
    def sentence(self) -> Sentence:
        """Title, reason, cost and remedy."""
        return Sentence(
            "{title}: {why}. {cost} {help}",
            title=self.title, why=self.why, cost=self.cost, help=self.help,
        )  # fmt: skip


class Fallbacks:
    """List of current fallbacks, including `shared` ones on its devices. Thread-safe."""

    def __init__(self, devices: Collection[str] = (), shared: Fallbacks | None = None) -> None:
        self._devices = frozenset(devices)
        self._shared = shared
        self._lock = threading.Lock()
        self._found: tuple[Fallback, ...] = ()  # replaced as a whole, so reading needs no lock

    @property
    def current(self) -> tuple[Fallback, ...]:
        """The current fallbacks, in the order in which they were reported."""
        shared = () if self._shared is None else self._shared.current
        if not shared:
            return self._found
        return tuple(found for found in shared if self._touches(found)) + self._found

    def _touches(self, fallback: Fallback) -> bool:
        return bool(self._devices.intersection(fallback.devices or self._devices))

    def report(self, kind: FallbackKind, devices: Iterable[str], why: str, help: str = "") -> None:  # noqa: A002
        """Add a fallback unless it is already listed; see `Fallback` for the arguments."""
        found = Fallback(kind, tuple(devices), why, help)
        with self._lock:
            if found not in self._found:
                self._found += (found,)

    def withdraw(self, kind: FallbackKind) -> None:
        """Remove all fallbacks of a kind."""
        with self._lock:
            self._found = tuple(found for found in self._found if found.kind != kind)

    def take_over(self, other: Fallbacks, kind: FallbackKind) -> None:
        """Add another model's fallbacks of a kind on devices that this model also uses."""
        for found in other.current:
            if found.kind == kind and self._touches(found):
                self.report(found.kind, found.devices, found.why, found.help)


OF_THIS_PROCESS = Fallbacks()
"""Fallbacks that affect every model in this process, such as a full disk for compiled kernels."""
