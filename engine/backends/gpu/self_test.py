"""Self-test of the kernels on a GPU, run once, before a model is planned for that GPU.

As compilers, drivers and cards vary, the reference backend is used if a kernel's results differ
from torch's.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TextIO

import gguf

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np
import torch
from torch import Tensor

from engine.backends.gpu import attention, elementwise
from engine.backends.gpu.launch.configs import target_of
from engine.backends.gpu.launch.graph import capture
from engine.backends.gpu.launch.own_launcher import prepare
from engine.backends.gpu.loading.weight_loader import pack
from engine.backends.gpu.matmul import gemv, tile_gemm
from engine.backends.gpu.matmul.weights import GpuPlanes
from engine.backends.gpu.page_tables import PagedRows
from engine.errors import EngineError, Sentence
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from engine.hardware.faults import fault_of
from engine.hardware.torch_devices import is_out_of_memory
from engine.model.forward.attention import attend
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.ops import Ops
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from engine.util.programs import tie_to_parent

log = logging.getLogger(__name__)

KINDS = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)  # tested types
N_ROW, N_COLUMN, N_HEAD, HEAD_DIM, N_PAST = 48, 256, 2, 64, 70
TOLERANCE = 0.03  # for the relative RMS error: activations are rounded to bytes or to BF16


@cache
def problem_of(device: torch.device) -> str:
    """Return why kernels must not be used on a GPU, as the end of a sentence; "" if they may be.

    Raises:
        RuntimeError: the GPU is lost to this process, or its memory is full.
    """
    try:
        if device.type == "cuda":
            prepare()
        with torch.inference_mode():
            for check in CHECKS.values():
                check(device)
    except Exception as error:  # drivers and compilers fail in many ways
        if fault_of(error) or is_out_of_memory(error):
            raise
        log.warning("kernels do not work on %s", device, exc_info=True)
        return described(error)
    return ""


def described(error: Exception) -> str:
    """Return a check's error as the end of a sentence."""
    if isinstance(error, EngineError):
        return error.message.rstrip(".")
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _norm(device: torch.device) -> None:
    x, weight = _random(3, N_COLUMN, device=device), _random(N_COLUMN, device=device)
    y = elementwise.rms_norm(x, weight, None, 1e-5)
    _compare(Sentence("a norm"), y, Ops().rms_norm(x, weight, None, 1e-5))


def _products(device: torch.device) -> None:
    many = min(40, tile_gemm.most_rows(target_of(device)))
    for kind in KINDS:
        weight, numbers = _matrix(kind, device)
        what = Sentence("products with {kind}", kind=kind.name)
        for n, product in ((1, gemv.product), (3, gemv.product), (many, tile_gemm.product)):
            x = _random(n, N_COLUMN, device=device)
            _compare(what, product(x, weight), x @ numbers.T)


def _attention(device: torch.device) -> None:
    heads = Ranges(((0, N_HEAD),), N_HEAD)
    state = KVState(heads, heads, HEAD_DIM, HEAD_DIM)
    cache, scores = LayerCache(state, 0, 2 * N_PAST, "f16", device), Scores(HEAD_DIM**-0.5)
    for start, n in ((0, N_PAST), (N_PAST, 1)):
        q, k, v = (_random(n, N_HEAD, HEAD_DIM, device=device) for _ in range(3))
        rows = PagedRows.alone(torch.arange(start, start + n, device=device), 2 * N_PAST)
        if not attention.write(cache, k, v, rows):
            raise EngineError("no kernel can write to the KV cache")
        y = attention.attention(q, cache, rows, scores)
        expected = attend(q, cache, Batch.of_one(start, n, 0), scores, None, None)
        _compare(Sentence("attention"), y, expected)


def _replay(device: torch.device) -> None:
    weight, numbers = _matrix(KINDS[0], device)
    x = _random(1, N_COLUMN, device=device)
    captured = capture(device, lambda: gemv.product(x, weight))
    x.copy_(_random(1, N_COLUMN, device=device) + 1)
    captured.replay()
    _compare(Sentence("a replayed product"), captured.result, x @ numbers.T)


CHECKS: Mapping[str, Callable[[torch.device], None]] = {
    "norms": _norm,
    "products": _products,
    "attention": _attention,
    "replays": _replay,
}


def _matrix(kind: gguf.GGMLQuantizationType, device: torch.device) -> tuple[GpuPlanes, Tensor]:
    numbers = np.random.default_rng(0).normal(size=(N_ROW, N_COLUMN)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(numbers, kind)).to(device)
    extent = Extent.of(0, N_COLUMN)
    shape = n_tiles(N_ROW), extent.tile_bytes(LAYOUTS[kind])
    planes = torch.zeros(shape, dtype=torch.uint8, device=device)
    pack(raw[None], kind, extent, planes[None])
    return GpuPlanes(planes, kind, N_ROW, extent, 1), dequantise(raw, kind)


def _random(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def _compare(what: Sentence, result: Tensor | None, expected: Tensor) -> None:
    if result is None:
        raise EngineError("no kernel can compute {what}", what=what)
    error = float((result - expected).square().mean() / expected.square().mean()) ** 0.5
    if not error < TOLERANCE:
        text = "{what} gave wrong results (relative error {error:.2g})"
        raise EngineError(text, what=what, error=error)


OPENING = "opening the GPU"  # name of the first step


def run(requests: TextIO, replies: TextIO) -> None:
    """Test kernels on the device that the first line of `requests` names.

    The replies are `{"begin": step}` before each step, then the result: `{"problem": sentence,
    "has_fault": whether the GPU is lost to this process}`, or `{"refused": sentence}` if the error
    says nothing about the kernels.
    """
    device = torch.device(json.loads(requests.readline())["device"])

    def reply(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply(begin=OPENING)
    try:
        torch.zeros(1, device=device)
        if device.type == "cuda":
            prepare()
    except Exception as error:  # noqa: BLE001 drivers fail in many ways
        reply(refused=described(error))
        return
    try:
        with torch.inference_mode():
            for what, check in CHECKS.items():
                reply(begin=what)
                check(device)
    except Exception as error:  # noqa: BLE001 drivers and compilers fail in many ways
        if is_out_of_memory(error):
            reply(refused=described(error))
        else:
            reply(problem=described(error), has_fault=bool(fault_of(error)))
        return
    reply(problem="", has_fault=False)


if __name__ == "__main__":
    tie_to_parent()
    run(sys.stdin, sys.stdout)
