"""Engine packs that this machine could use, the best first, and the update of the one in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import engine
from app.core.translation import tr, tr_later
from app.setup.engine_pack.lock import Lock, find_locks
from app.setup.engine_pack.store import Pack

TITLES = {
    "cpu": tr_later("Processor only"),
    "cuda13": tr_later("NVIDIA GPUs (CUDA 13)"),
    "cuda12": tr_later("NVIDIA GPUs (CUDA 12)"),
    "rocm": tr_later("AMD GPUs (ROCm)"),
    "environment": tr_later("an existing environment"),
}
"""Names of the kinds of PyTorch, translated where they are shown."""


@dataclass(frozen=True, slots=True)
class PackOffer:
    """A pack that can be installed here.

    Attributes:
        lock: its wheels; `lock.n_bytes` is the download, `lock.unpacked_bytes` the disk.
        is_recommended: whether it is the best for this machine; one of all offers is.
        uses_gpus: whether this machine has GPUs that it can use.
    """

    lock: Lock
    is_recommended: bool
    uses_gpus: bool

    @property
    def backend(self) -> str:
        """Kind of PyTorch, such as "cpu"."""
        return self.lock.backend

    @property
    def title(self) -> str:
        """Name of the kind of PyTorch, for a person."""
        return title_of(self.lock.backend)


def title_of(backend: str) -> str:
    """Return the name of a kind of PyTorch, for a person."""
    return tr(TITLES[backend]) if backend in TITLES else backend


def find_offers(folder: Path | None = None) -> tuple[PackOffer, ...]:
    """Return what can be installed here, the best first; asks drivers, so it may take a second.

    Without a lock for the processor alone, a pack for GPUs is recommended: all of them compute on
    the processor, too.

    Args:
        folder: lock files; Tandem's own if none are given.

    Raises:
        EngineError: a lock file is damaged.
    """
    locks = find_locks(folder)
    suitable: tuple[str, ...] = engine.suitable_torch()

    def rank(lock: Lock) -> tuple[int, int]:
        known = lock.backend in suitable
        return (suitable.index(lock.backend) if known else len(suitable), lock.n_bytes)

    return tuple(
        PackOffer(lock, number == 0, lock.backend != "cpu" and lock.backend in suitable)
        for number, lock in enumerate(sorted(locks, key=rank))
    )


def find_update(pack: Pack | None, offers: Sequence[PackOffer]) -> PackOffer | None:
    """Return the newer offer of the kind in use; None if there is none, or none is in use."""
    if pack is None or pack.is_environment:
        return None
    same = (offer for offer in offers if offer.backend == pack.backend)
    found = next(same, None)
    is_newer = found is not None and (found.lock.digest != pack.digest or not pack.is_usable)
    return found if is_newer else None
