"""Kernels serve cards of all capabilities and sizes, as far as these decide on launches."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.gpu import self_test
from engine.backends.gpu.launch import configs as target
from engine.backends.gpu.launch.configs import KernelTarget
from tests.engine.backends.gpu import test_attention, test_experts, test_routing
from tests.engine.backends.gpu.matmul import test_gemv, test_unquantised, test_weights
from tests.helpers.ptx import emulated
from tests.helpers.tiers import paired

CPU = torch.device("cpu")

CAPABILITIES = (61, 70, 75, 80, 86, 89, 90, 100, 120)
N_SMS = (48, 68, 84, 108, 132, 148, 170, 304)


@pytest.fixture
def card(capability: int, n_sm: int) -> Iterator[None]:
    """Make the CPU an NVIDIA card with interpreted kernels."""
    with (
        mock.patch.dict(target._cards, {CPU: KernelTarget("nvidia", capability, n_sm)}),
        mock.patch.object(KernelTarget, "is_interpreted", True),
        emulated(),
    ):
        yield


def attend(kv_type: str) -> None:
    for n_tokens, n_past in ((1, 60), (20, 40)):
        held = test_attention.layer(kv_type, 4, 2, 64, 64, 70)
        test_attention.check(held, test_attention.numbers(3, n_tokens, 4, 64), n_past)


OPERATIONS: dict[str, Callable[[], None]] = {
    "few rows": lambda: test_gemv.test_sizes(40, 96, 2048, "cpu"),
    "unquantised": lambda: test_unquantised.test_products(37, 264, 3, torch.float16, "cpu"),
    "some rows": lambda: test_weights.test_products_of_any_number_of_rows(40, "cpu"),
    "many rows": lambda: test_weights.test_products_of_any_number_of_rows(257, "cpu"),
    "experts": lambda: test_experts.test_cuts(Kind.Q8_0, 0, 256, "cpu"),
    "unquantised experts": lambda: test_experts.test_plain_matrices(
        torch.bfloat16, 64, 12, "cpu"
    ),
    "routing": lambda: test_routing.test_many_tokens_are_sorted_by_expert(
        test_routing.RULES[0], 40, "cpu"
    ),
    "attention": lambda: attend("f16"),
    "attention in blocks": lambda: attend("q8_0"),
}  # fmt: skip


@pytest.mark.parametrize(("capability", "n_sm"), paired(CAPABILITIES, N_SMS))
@pytest.mark.usefixtures("card")
def test_the_self_test_passes() -> None:
    assert self_test.problem_of.__wrapped__(CPU) == ""


@pytest.mark.parametrize("n_sm", [48, 304])
@pytest.mark.parametrize(("capability", "name"), paired(CAPABILITIES, tuple(OPERATIONS)))
@pytest.mark.usefixtures("card")
def test_operations_compute_what_they_do_elsewhere(name: str) -> None:
    OPERATIONS[name]()
