"""Which cases of a test run each time, and which belong to the sweeps behind `-m slow`."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind

TYPICAL_TYPES = (
    Kind.Q2_K, Kind.Q4_K, Kind.Q5_1, Kind.Q6_K, Kind.Q8_0, Kind.IQ4_NL, Kind.MXFP4, Kind.IQ1_M,
    Kind.IQ2_XS, Kind.TQ2_0, Kind.NVFP4,
)  # fmt: skip
"""One quantised type for each way in which kernels for GPUs read codes and scales."""


def swept(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the cases as parameters of one test; all but the quick ones are slow."""
    return [_case(case, is_quick=case in quick) for case in cases]


def paired(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters of one test; all but a diagonal of them are slow.

    The diagonal has every value of both sequences at least once, and as few pairs as do so.
    """
    return [
        _case(a, b, is_quick=i % len(second) == j % len(first))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def first_in_full(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters of one test; quick are those of first[0], and a diagonal."""
    return [
        _case(a, b, is_quick=i == 0 or j == i % len(second))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def slow(*cases: Sequence[Any]) -> list[Any]:
    """Return cases, each with the values of all its parameters, that only the sweep runs."""
    return [_case(*case, is_quick=False) for case in cases]


def _case(*values: Any, is_quick: bool) -> Any:
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
