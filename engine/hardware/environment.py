"""Variables that torch and its libraries read when they are imported; import this module first.

What a person has set stays as it is, but for an order of GPUs in which nobody has named one.
"""

from __future__ import annotations

import os

from engine.devices.visibility import ORDER, PCI_ORDER, VISIBLE, has_numbers

DEFAULTS = {
    # CUDA would put the fastest GPU first, and a number would mean another one than in NVML
    ORDER: PCI_ORDER,
    # a thread that waits for others must not keep them from running where cores are few or busy
    "OMP_WAIT_POLICY": "PASSIVE",
    # from 3.10 on Triton would no longer join a product and a sum, where it is not told to
    "TRITON_DEFAULT_FP_FUSION": "1",
}

LOADING = "CUDA_MODULE_LOADING"


def loads_kernels_late() -> bool:
    """Whether CUDA loads a kernel only when it first starts, and waits for all of its GPU then.

    To load all at once takes hundreds of MB on each GPU, for PyTorch's kernels above all, so that
    is left to who sets the variable to EAGER.
    """
    return os.environ.get(LOADING, "").upper() != "EAGER"


def starts_wait() -> bool:
    """Whether a start of a kernel waits for its end, as people ask for who look for a fault."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
if not loads_kernels_late():
    # ranks of one GPU wait for each other in kernels then; with fewer queues of the hardware than
    # streams, what one waits for could stand in line behind what follows it
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
if not has_numbers(os.environ.get(VISIBLE)):
    os.environ[ORDER] = PCI_ORDER
