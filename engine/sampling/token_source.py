"""Logits as the host sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
"""Logits as an array of the host."""
