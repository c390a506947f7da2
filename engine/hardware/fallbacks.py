"""Slower ways that GPUs fall back to, and the lists in which a model and this process keep them.

Whatever makes a GPU slower than it could be is reported here, with its reason: a person sees it
in the window, in `Model.warnings` and beside each measured speed. Without torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

FallbackKind = Literal[
    "kernels", "weights", "operations", "graph", "exchange", "sampling", "copies", "memory",
    "compiling", "launcher", "wrong", "draft", "pictures", "machines",
]  # fmt: skip
"""Kinds of fallbacks. "kernels": PyTorch computes everything. "weights": PyTorch computes some of
the products. "operations": PyTorch computes steps for which there is no kernel. "graph":
kernels are started one by one. "exchange": the host takes part in exchanges between GPUs.
"sampling": the host draws tokens. "copies": large values are copied, not sent by NCCL.
"memory": host memory could not be pinned. "compiling": compiled kernels are not kept.
"launcher": kernels are started by Tandem, not by Triton's launcher. "wrong": some kernels came
out wrong in a check of a load, and slower ones or PyTorch compute instead. "draft": the draft
model has failed, on any device. "pictures": the encoder of pictures could not be loaded again
behind a re-split. "machines": values go through host memory between machines."""

MAX_REASON = 300
"""Most characters of a reason; drivers and compilers can say very much."""


class _Words(NamedTuple):
    """What a person reads about a kind of fallback.

    Attributes:
        title: what is different, with {} for the devices.
        cost: sentence on what is slower.
        help: sentence on what may help.
    """

    title: str
    cost: str
    help: str


_AGAIN = "Load the model again; if it stays so, a newer driver may help."

_RELOAD = "Load the model again for them."

_WORDS: dict[FallbackKind, _Words] = {
    "kernels": _Words(
        "On {}, PyTorch computes instead of Tandem's kernels",
        "Prompts and tokens are much slower.",
        "A newer driver, PyTorch or Triton may help.",
    ),
    "weights": _Words(
        "On {}, PyTorch computes with some of the weights",
        "Prompts and tokens are slower.",
        "A newer driver, PyTorch or Triton may help.",
    ),
    "operations": _Words(
        "On {}, PyTorch computes some steps of this model",
        "Prompts and tokens are slower.",
        "Please report the model, so that it gets a kernel.",
    ),
    "wrong": _Words(
        "On {}, some kernels are not used",
        "Prompts or tokens may be slower.",
        "A newer driver, PyTorch or Triton may help.",
    ),
    "graph": _Words("On {}, kernels are started one by one", "Tokens are slower.", _AGAIN),
    "exchange": _Words(
        "Between {}, the processor takes part in each exchange", "Tokens are slower.", _AGAIN
    ),
    "sampling": _Words(
        "Tokens are drawn by the processor and not on {}", "Tokens are slower.", _AGAIN
    ),
    "copies": _Words("Between {}, NCCL is not used", "Prompts are slower.", _AGAIN),
    "memory": _Words(
        "Copies to and from {} need the processor's help",
        "Loading and prompts are slower.",
        "Close other programs, or allow more locked memory (ulimit -l).",
    ),
    "compiling": _Words(
        "Kernels for GPUs are compiled anew at each start",
        "Loading is slower.",
        "Let TANDEM_KERNEL_CACHE name a folder with free space that only you can write.",
    ),
    "launcher": _Words(
        "Kernels are started without Triton's own launcher",
        "Prompts may be slower.",
        "Install gcc and Python's headers (python3-dev).",
    ),
    "draft": _Words(
        "The draft model on {} has stopped", "Answers go on without its guesses.", _RELOAD
    ),
    "pictures": _Words(
        "The encoder of pictures is not on {}", "New pictures cannot be seen.", _RELOAD
    ),
    "machines": _Words(
        "Between the machines, NCCL is not used",
        "Prompts, and tokens with a tensor split, may be slower.",
        "The page on several machines lists what to check; --machine-link gloo tries no NCCL.",
    ),
}


@dataclass(frozen=True, slots=True)
class Fallback:
    """One slower way in which GPUs work, and the reason for it.

    Attributes:
        kind: what is slower.
        devices: ids of the devices that are slower; none where it is all GPUs of this machine.
        why: reason as the end of a sentence, in one line.
        help: sentence on what helps; "" is what may help in any case of this kind.
    """

    kind: FallbackKind
    devices: tuple[str, ...]
    why: str
    help: str = ""

    def __post_init__(self) -> None:
        line = next(iter(self.why.strip().splitlines()), "").strip()[:MAX_REASON]
        why = re.sub(r"[.\s]+$", "", line) or "the reason is unknown"
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "devices", tuple(dict.fromkeys(self.devices)))
        object.__setattr__(self, "help", self.help or _WORDS[self.kind].help)

    @property
    def title(self) -> str:
        """Title of the fallback, such as "On cuda:0, kernels are started one by one"."""
        return _WORDS[self.kind].title.format(_listed(self.devices))

    @property
    def cost(self) -> str:
        """Sentence on what is slower."""
        return _WORDS[self.kind].cost

    @property
    def sentence(self) -> str:
        """Sentence on the fallback: what differs, why, its cost and a remedy."""
        return f"{self.title}: {self.why}. {self.cost} {self.help}"


class Fallbacks:
    """List of the fallbacks that apply now; safe to use from several threads.

    Args:
        devices: names of the GPUs that a model uses.
        shared: list of fallbacks of this process; those that touch `devices` are in this list, too.
    """

    def __init__(self, devices: Collection[str] = (), shared: Fallbacks | None = None) -> None:
        self._devices = frozenset(devices)
        self._shared = shared
        self._lock = threading.Lock()
        self._found: tuple[Fallback, ...] = ()  # replaced as a whole, so reading needs no lock

    @property
    def current(self) -> tuple[Fallback, ...]:
        """The fallbacks that apply now, in the order in which they were reported."""
        shared = () if self._shared is None else self._shared.current
        if not shared:
            return self._found
        return tuple(found for found in shared if self._touches(found)) + self._found

    def _touches(self, fallback: Fallback) -> bool:
        return bool(self._devices.intersection(fallback.devices or self._devices))

    def report(self, kind: FallbackKind, devices: Iterable[str], why: str, help: str = "") -> None:  # noqa: A002
        """Add a fallback unless the same one is there; see `Fallback` for the arguments."""
        found = Fallback(kind, tuple(devices), why, help)
        with self._lock:
            if found not in self._found:
                self._found += (found,)

    def withdraw(self, kind: FallbackKind) -> None:
        """Drop all fallbacks of a kind, which do not apply any more."""
        with self._lock:
            self._found = tuple(found for found in self._found if found.kind != kind)

    def take_over(self, other: Fallbacks, kind: FallbackKind) -> None:
        """Add another model's fallbacks of a kind on those devices that this model uses, too."""
        for found in other.current:
            if found.kind == kind and self._touches(found):
                self.report(found.kind, found.devices, found.why, found.help)


OF_THIS_PROCESS = Fallbacks()
"""Fallbacks that concern every model of this process, such as a full disk for kernels."""


def _listed(names: Iterable[str]) -> str:
    *others, last = list(names) or ["all GPUs"]
    return f"{', '.join(others)} and {last}" if others else last
