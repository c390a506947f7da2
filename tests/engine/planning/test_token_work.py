"""Bytes and operations of a token, against sums over the file's tensors by name."""

from math import prod
from pathlib import Path

import gguf
import pytest

from engine import token_work
from tests.bench.synthetic import Sizes, write_model

SIZES = [
    Sizes("llama", 3, 256, 4, 2, 512, 600),
    Sizes("llama", 3, 256, 4, 2, 512, 600, tied=True),
    Sizes("olmoe", 2, 256, 4, 4, 256, 600, n_expert=8, n_expert_used=2),
]


@pytest.mark.parametrize("sizes", SIZES, ids=["untied", "tied", "experts"])
def test_a_token_reads_what_it_is_multiplied_with(sizes: Sizes, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", sizes, "Q4_K_M")
    n_bytes = n_flop = n_head_flop = 0.0
    for tensor in gguf.GGUFReader(path).tensors:
        part = 1 / 4 if "_exps" in tensor.name else 1
        flop = 2 * part * prod(tensor.shape.tolist()) if len(tensor.shape) > 1 else 0
        is_embedding = tensor.name == "token_embd.weight"
        if is_embedding and not sizes.tied:
            n_bytes += int(tensor.n_bytes) / 600
            continue
        n_bytes += part * int(tensor.n_bytes)
        if is_embedding or tensor.name == "output.weight":
            n_head_flop += flop
        else:
            n_flop += flop
    work = token_work(path)
    assert work.n_bytes == pytest.approx(n_bytes)
    assert work.n_flop == n_flop
    assert work.n_head_flop == n_head_flop == 2 * 600 * 256


def test_a_prompt_needs_logits_once(tmp_path: Path) -> None:
    work = token_work(write_model(tmp_path / "m.gguf", SIZES[0], "Q8_0"))
    assert work.prompt_flop(20) == 20 * work.n_flop + work.n_head_flop
