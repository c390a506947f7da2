"""Sentences that people see: the numbers in them make sense together."""

import pytest

from engine import OutOfDeviceMemory

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("needed", "free", "said"),
    [
        (8 * GIB, 2 * GIB, "cuda:0 has 2.00 GiB free but 8.00 GiB are needed to load."),
        (4 * GIB + MIB, 4 * GIB, "cuda:0 has 4096.0 MiB free but 4097.0 MiB are needed to load."),
        (4 * GIB + 1, 4 * GIB, "cuda:0 has 4.00 GiB free but more is needed to load."),
        (1, 0, "cuda:0 has 0.00 GiB free but more is needed to load."),
    ],
)
def test_a_shortage_never_names_one_number_twice(needed: int, free: int, said: str) -> None:
    assert str(OutOfDeviceMemory("cuda:0", needed, free, "to load")) == said


def test_a_limit_of_memory_is_named_where_the_machine_has_enough() -> None:
    """As under `ulimit -v` or in a container: what is free is told by the machine."""
    found = OutOfDeviceMemory("cpu", 20 * GIB + 1, 20 * GIB, "to read the prompt")
    assert found.hint.endswith("If that much is free, this program has a memory limit: raise it.")
    assert "limit" not in OutOfDeviceMemory("cpu", 9 * GIB, 2 * GIB, "to load").hint
    assert "limit" not in OutOfDeviceMemory("cuda:0", GIB + 1, GIB, "to load").hint
