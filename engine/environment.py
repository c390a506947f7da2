"""Variables that torch and its libraries read when they are imported; import this module first.

What a person has set stays as it is.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # CUDA would put the fastest GPU first, and a number would mean another one than in NVML
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # a thread that waits for others must not keep them from running where cores are few or busy
    "OMP_WAIT_POLICY": "PASSIVE",
    # from 3.10 on Triton would no longer join a product and a sum, where it is not told to
    "TRITON_DEFAULT_FP_FUSION": "1",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
