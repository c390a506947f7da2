"""Dry runs: no layer of any architecture reads a number back from the device."""

from pathlib import Path

import pytest

from engine import LoadParams
from engine.backends.gpu.kernels import one_shot
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.loading.dry_run import collect_launches
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.declare import declare
from engine.model.forward.batch import SMALL_BATCH
from tests.helpers.golden import golden_models, golden_path
from tests.helpers.hollow import hollow_llama
from tests.helpers.mtp_models import mtp_gguf
from tests.helpers.tiny_gguf import tiny_gguf

H200 = KernelTarget("nvidia", 90, 132)
ROWS = (1, 2, 8, 40, 300)

N_ENDINGS = 2
"""Number of further passes, in which few rows reach the last layer."""


def starts_of(path: Path, rank: int = 0, **options: object) -> list[str]:
    """Return the names of the kernels that passes over `ROWS` rows would launch."""
    params = LoadParams(str(path), n_ctx=320, **options)
    with GGUFFile.open(path) as file:
        found = collect_launches(declare(file, params), rank, params, H200, ROWS)
    return [start.kernel.__name__ for start in found]


@pytest.mark.parametrize("name", sorted(golden_models()) or ["none"])
def test_all_architectures_can_be_captured(name: str) -> None:
    names = starts_of(golden_path(f"{name}.gguf"))
    assert len(names) > 5 * len(ROWS)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "F16", "F32"])
def test_a_small_model_can_be_captured(tmp_path: Path, quant: str) -> None:
    names = starts_of(tiny_gguf(tmp_path / "m.gguf", quant=quant))
    assert names.count("attend") == 2 * (len(ROWS) + N_ENDINGS)
    n_longer = sum(n > SMALL_BATCH for n in ROWS)  # small batches are written by `attend`
    assert names.count("store") == 2 * (n_longer + N_ENDINGS)


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_runs_dry_alone(tmp_path: Path, mode: str, rank: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    names = starts_of(path, rank, devices=("cuda:0", "cuda:1"), split_mode=mode)
    assert names.count("attend") == (2 if mode == "tensor" else 1) * (len(ROWS) + N_ENDINGS)


@pytest.mark.parametrize(("mode", "n_mtp"), [("tensor", 1), ("layer", 1), ("tensor", 3)])
def test_guesses_of_a_block_run_dry_on_its_ranks(tmp_path: Path, mode: str, n_mtp: int) -> None:
    """A draft attends once more than the passes over the model's blocks, which write for it."""
    path = mtp_gguf(tmp_path / "m.gguf", quant="Q8_0", n_mtp=n_mtp)
    n = len(ROWS) + N_ENDINGS
    for rank, n_own in ((0, 2), (1, 2)) if mode == "tensor" else ((0, 1), (1, 1)):
        options = {"devices": ("cuda:0", "cuda:1"), "split_mode": mode}
        names, guessing = (
            starts_of(path, rank, draft=draft, **options) for draft in ("off", "mtp")
        )
        n_longer = sum(rows > 1 for rows in ROWS) + N_ENDINGS  # prompts, which the block reads
        has_block = mode == "tensor" or rank == 1
        assert names.count("attend") == n_own * n
        assert guessing.count("attend") == n_own * n + (n_longer + 1) * n_mtp * has_block


@pytest.mark.parametrize(("second", "n_sum"), [("cuda:1", 4), ("cuda:0", 4), ("cpu", 0)])
def test_ranks_on_gpus_launch_their_sums(tmp_path: Path, second: str, n_sum: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=2)
    params = LoadParams(str(path), n_ctx=320, devices=("cuda:0", second), split_mode="tensor")
    with GGUFFile.open(path) as file:
        found = collect_launches(declare(file, params), 0, params, H200, ROWS)
    fused = [start for start in found if start.kernel is one_shot.add_norm]
    assert len(fused) == n_sum * (len(ROWS) + N_ENDINGS)
    assert all(start.constants["ASM"] and start.constants["PUSH"] for start in fused)


def test_a_token_needs_few_kernels(tmp_path: Path) -> None:
    """A block of a dense model has few: the gaps between kernels take time."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=9)
    params = LoadParams(str(path), n_ctx=320)
    with GGUFFile.open(path) as file:
        n_long = len(collect_launches(declare(file, params), 0, params, H200, (1,)))
    short = tiny_gguf(tmp_path / "s.gguf", quant="Q8_0", n_layer=1)
    params = LoadParams(str(short), n_ctx=320)
    with GGUFFile.open(short) as file:
        n_short = len(collect_launches(declare(file, params), 0, params, H200, (1,)))
    assert (n_long - n_short) / 8 <= 14


def test_a_batch_needs_few_kernels(tmp_path: Path) -> None:
    """A block of an 8B in Q4_K_M: one for each of 7 matrices, and 6 around them."""
    n_starts = []
    for n_layer in (1, 3):
        path = hollow_llama(tmp_path / f"{n_layer}.gguf", n_layer=n_layer)
        params = LoadParams(str(path), n_ctx=8192)
        with GGUFFile.open(path) as file:
            n_starts.append(len(collect_launches(declare(file, params), 0, params, H200, (512,))))
    assert n_starts[1] - n_starts[0] <= 2 * 13 * (1 + N_ENDINGS)
