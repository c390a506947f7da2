"""Count of the memory of live tensors, which works on torch's device "meta", too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Count of the bytes of all tensors that are made while it is active.

    Attributes:
        n_bytes: bytes of all tensors that exist now.
        peak: largest value of `n_bytes` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = self.peak = 0
        self._held: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(found, Tensor) and self.counts(found):
                self._add(found)
        return result

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory counts."""
        return True

    def taken(self, key: int, n_bytes: int) -> None:
        """Note that memory is taken, known by `key` as long as it is."""

    def freed(self, key: int) -> None:
        """Note that memory is free again."""

    def _add(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key, n_bytes = memory._cdata, memory.nbytes()
        n_tensor, n_bytes = self._held.get(key, (0, n_bytes))
        if not n_tensor:
            self.n_bytes += n_bytes
            self.peak = max(self.peak, self.n_bytes)
            self.taken(key, n_bytes)
        self._held[key] = n_tensor + 1, n_bytes
        weakref.finalize(tensor, self._remove, key)

    def _remove(self, key: int) -> None:
        n_tensor, n_bytes = self._held.pop(key)
        if n_tensor > 1:
            self._held[key] = n_tensor - 1, n_bytes
        else:
            self.n_bytes -= n_bytes
            self.freed(key)
