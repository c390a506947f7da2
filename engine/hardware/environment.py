"""Sets environment variables that torch and its libraries read on import; import this before torch.

Variables set by the user are kept, except CUDA_DEVICE_ORDER if no GPU is selected by its number.
"""

from __future__ import annotations

import os

from engine.hardware.devices.visibility import ORDER, PCI_ORDER, VISIBLE, has_numbers

DEFAULTS = {
    # by default, CUDA puts the fastest GPU first, so its numbers would differ from NVML's
    ORDER: PCI_ORDER,
    # waiting threads must not take cores from others
    "OMP_WAIT_POLICY": "PASSIVE",
    # from version 3.10 on, Triton fuses a product and a sum only on request
    "TRITON_DEFAULT_FP_FUSION": "1",
}

LOADING = "CUDA_MODULE_LOADING"


def loads_kernels_lazily() -> bool:
    """Return whether CUDA loads each kernel at its first launch, and then waits for the whole GPU.

    Loading all kernels at startup takes hundreds of MB on each GPU, mostly for PyTorch's kernels,
    so this happens only if the user sets the variable to EAGER.
    """
    return os.environ.get(LOADING, "").upper() != "EAGER"


def launches_block() -> bool:
    """Return whether a kernel launch waits until the kernel has finished, a debugging setting."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
if not loads_kernels_lazily():
    # ranks on one GPU then wait for each other in kernels; with fewer hardware queues than streams,
    # a kernel could be queued behind the one that waits for it
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
if not has_numbers(os.environ.get(VISIBLE)):
    os.environ[ORDER] = PCI_ORDER
