"""Speeds that others published for several GPUs, with the ratio of prediction to publication.

A row's engine is calibrated by the row it is paced by: a speed of the same engine on one such GPU,
or in whole blocks on one GPU after the other. Nothing else is fitted.

Left out: exllamav2's gain on three GPUs (exllamav2#571), which are not named; prompts
of 2048 tokens by llama.cpp in layers, of which four GPUs compute four parts at once; other prompts
of llama.cpp#19378, whose speeds are not told; speeds with speculation, which is not predicted;
nano-vllm's, of many requests at once; 26.4 tokens/s of ik_llama.cpp#1057, which waited for the GPUs
at each all-reduce then. Of vLLM's 35B-A3B and 27B FP8 only gains are here, as no speed on one GPU
is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tests.bench import published_models as m
from tests.bench.engines import (
    GPT_FAST,
    IK,
    IK_ASYNC,
    LLAMA_BUTTERFLY,
    LLAMA_INTERNAL,
    LLAMA_NCCL,
    VLLM_OWN,
    VLLM_PEERS,
    VLLM_SHM,
    Engine,
)
from tests.bench.published_models import Model

Mode = Literal["tensor", "layer"]
Category = Literal["alone", "generation", "prompt", "gain"]

ALONE: Category = "alone"
EXPERTS = "many small products reach less of the peak"
FALLBACK = (
    "the fallback's copies take 0.4 to 0.6 ms more than their bytes; nothing published says why"
)

ONE = ("3090", "4090", "5090", "A100")


SHORT = 512
"""Context in tokens of a row whose source names none."""


@dataclass(frozen=True)
class Case:
    """A run whose speed was published.

    Attributes:
        n_prompt: number of tokens of a prompt, computed at once; 0 for decode.
        context: number of tokens in the KV cache before.
        shares: shares of the GPUs; empty for even ones.
    """

    engine: Engine
    rig: str
    model: Model
    mode: Mode = "tensor"
    n_prompt: int = 0
    context: int = SHORT
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """A published speed.

    Attributes:
        name: source and model.
        published: tokens per second, or the ratio to the speed of `over`.
        ratio: ratio of predicted to published speed when the row was written; it may not drift.
        paced_by: row that calibrates the engine; None for the speed that every GPU should reach.
        over: case that the published ratio compares with; None if tokens per second were published.
        why: reason why the ratio is not within 25 %; empty where it is.
    """

    name: str
    category: Category
    case: Case
    published: float
    ratio: float
    paced_by: Row | None = None
    over: Case | None = None
    why: str = ""


def _alone(
    name: str, engine: Engine, rig: str, model: Model, published: float, ratio: float, *,
    n_prompt: int = 0, context: int | None = None, why: str = "",
) -> Row:  # fmt: skip
    """Return a row of one GPU, or of whole blocks on one GPU after the other."""
    mode: Mode = "tensor" if rig in ONE else "layer"
    before = (0 if n_prompt else SHORT) if context is None else context
    case = Case(engine, rig, model, mode, n_prompt, before)
    return Row(name, ALONE, case, published, ratio, why=why)


def _on(
    paced_by: Row, rig: str, published: float, ratio: float, *, engine: Engine | None = None,
    model: Model | None = None, shares: tuple[float, ...] = (), name: str = "", why: str = "",
) -> Row:  # fmt: skip
    """Return a row like `paced_by`, on another rig and split by tensor."""
    case = replace(paced_by.case, rig=rig, mode="tensor", shares=shares)
    case = replace(case, engine=engine or case.engine, model=model or case.model)
    category: Category = "prompt" if case.n_prompt else "generation"
    return Row(name or paced_by.name, category, case, published, ratio, paced_by, why=why)


def _gain(
    name: str, case: Case, published: float, ratio: float, paced_by: Row | None, over: Case
) -> Row:
    return Row(name, "gain", case, published, ratio, paced_by, over)


FOUR_4090 = "epyc 9654,4x4090"
FOUR_3090 = "epyc 9654,4x3090@p2p"
TWO_5090, TWO_9070 = "2x5090@host,x8", "2x9070xt@host,x8"
"""Rigs of four GPUs are servers. A desktop computer has sixteen lanes for graphics: two cards get
eight each, as is told of one of the rigs with two 5090s (club-3090#833)."""

LLAMA_1B = _alone("llama.cpp#19378, 1B F16", LLAMA_NCCL, "4090", m.LLAMA_1B, 315, 1.01)
GEMMA_31B = _alone("llama.cpp#19378, 31B Q4_K_M", LLAMA_NCCL, FOUR_4090, m.GEMMA_31B, 43.8, 1.01)
GEMMA_A4B = _alone(
    "llama.cpp#19378, 26B-A4B Q4_0", LLAMA_NCCL, FOUR_4090, m.GEMMA_26B_A4B, 197, 1.20
)
GPT_OSS = _alone("llama.cpp#19378, gpt-oss-120B", LLAMA_NCCL, FOUR_4090, m.GPT_OSS_120B, 180, 1.09)
QWEN_5090 = _alone("llama.cpp#28196, 27B Q4_K_M", LLAMA_NCCL, "5090", m.QWEN_27B, 76.7, 1.10)
QWEN_9070 = _alone(
    "llama-cpp-rdna-boosts#27, 27B Q4_K_S, 16k", LLAMA_BUTTERFLY, TWO_9070, m.QWEN_27B_Q4_0_CACHE,
    27.42, 1.23, context=16384,
)  # fmt: skip
IK_32B = _alone("ik_llama.cpp#1107, 32B", IK, "2x3090@p2p", m.QWEN_32B, 42.33, 0.95, context=0)
IK_A3B = _alone(
    "ik_llama.cpp#1080, 30B-A3B", IK_ASYNC, "2x3090@p2p", m.QWEN_30B_A3B, 125.1, 2.21, context=0,
    why="far below llama.cpp on a 3090; a quantisation of its own",
)  # fmt: skip
VLLM_27B = _alone("HyperQwen#135, vLLM, 27B int4", VLLM_SHM, "3090", m.QWEN_27B_INT4, 46, 1.07)
FAST_7B = _alone("gpt-fast, 7B BF16", GPT_FAST, "A100", m.LLAMA_7B, 104.9, 1.01, context=5)
FAST_8B = _alone("gpt-fast, 8B BF16", GPT_FAST, "A100", m.LLAMA_8B, 93.9, 1.01, context=5)
FAST_INT4 = _alone(
    "gpt-fast, 70B int4", GPT_FAST, "A100", m.LLAMA2_70B_INT4, 25.25, 1.32, context=5,
    why="its kernel for int4 reads slower, as its README says",
)  # fmt: skip

PROMPT_31B = _alone(
    "llama.cpp#19378, 31B Q4_K_M, pp512", LLAMA_NCCL, FOUR_4090, m.GEMMA_31B, 2998, 0.95,
    n_prompt=512,
)  # fmt: skip
PROMPT_A4B = _alone(
    "llama.cpp#19378, 26B-A4B Q4_0, pp512", LLAMA_NCCL, FOUR_4090, m.GEMMA_26B_A4B, 8682, 2.03,
    n_prompt=512, why=EXPERTS,
)  # fmt: skip
PROMPT_70B = _alone(
    "llama.cpp#22299, 70B Q4_K_M, pp512", LLAMA_INTERNAL, TWO_5090, m.LLAMA_70B, 1737, 0.77,
    n_prompt=512,
)  # fmt: skip
PROMPT_3B = _alone(
    "llama.cpp#22299, 3B Q8_0, pp512", LLAMA_INTERNAL, TWO_5090, m.LLAMA_3B, 23081, 1.30,
    n_prompt=512, why="the part of the peak is that of 8B models, smaller ones reach less",
)  # fmt: skip
PROMPT_A3B = _alone(
    "llama.cpp#22299, 35B-A3B Q8_0, pp512", LLAMA_INTERNAL, TWO_5090, m.QWEN_35B_A3B_Q8, 7777, 1.74,
    n_prompt=512, why=EXPERTS,
)  # fmt: skip
PROMPT_IK = _alone(
    "ik_llama.cpp#1107, 32B, pp2048", IK_ASYNC, "2x3090@p2p", m.QWEN_32B, 1338, 0.72,
    n_prompt=2048, why="the part of the peak is llama.cpp's for 512 tokens",
)  # fmt: skip
PROMPT_9070 = _alone(
    "llama-cpp-rdna-boosts#27, 27B Q4_K_S, pp512", LLAMA_BUTTERFLY, TWO_9070,
    m.QWEN_27B_Q4_0_CACHE, 773, 2.49, n_prompt=512, context=16384,
    why="the part of the peak is that of NVIDIA's cards",
)  # fmt: skip

FIVE_FOUR = (5 / 9, 4 / 9)
LONG, LESS_LONG = 65_000, 40_000

IK_LONG = Case(IK, "2x3090@p2p", m.QWEN_32B, context=LONG)
IK_A3B_SHORT = Case(IK_ASYNC, "2x3090@p2p", m.QWEN_30B_A3B, context=0)
IK_A3B_LONG = replace(IK_A3B_SHORT, context=LESS_LONG)
CLUB_3090 = Case(VLLM_OWN, "2x3090@p2p", m.QWEN_27B_INT4)
CLUB_5090 = Case(VLLM_OWN, "2x5090@p2p,x8", m.QWEN_35B_A3B)
PRO_6000 = Case(VLLM_OWN, "epyc 9654,4xpro6000", m.QWEN_27B_FP8)

ROWS: tuple[Row, ...] = (
    LLAMA_1B, GEMMA_31B, GEMMA_A4B, GPT_OSS, QWEN_5090, QWEN_9070, IK_32B, IK_A3B, VLLM_27B,
    FAST_7B, FAST_8B, FAST_INT4,
    PROMPT_31B, PROMPT_A4B, PROMPT_70B, PROMPT_3B, PROMPT_A3B, PROMPT_IK, PROMPT_9070,
    _on(LLAMA_1B, FOUR_4090, 410, 1.06),
    _on(GEMMA_31B, FOUR_4090, 59.5, 1.47,
        why="a sum would take 85 µs; those of the other models on these GPUs take 43 to 49"),
    _on(GEMMA_A4B, FOUR_4090, 139, 1.14),
    _on(GPT_OSS, FOUR_4090, 180, 1.04),
    _on(QWEN_5090, TWO_5090, 107.5, 0.89, name="qwen38-mtp#73, 27B Q4_K_M"),
    _on(IK_32B, FOUR_3090, 48.6, 1.13, model=m.LLAMA_70B, name="ik_llama.cpp#1092, 70B"),
    _on(VLLM_27B, "epyc 9654,2x3090", 69.5, 1.05),
    _on(VLLM_27B, "epyc 9654,4x3090", 85.8, 1.12),
    _on(FAST_7B, "2xA100", 168.8, 1.01),
    _on(FAST_7B, "4xA100", 254, 1.02),
    _on(FAST_7B, "8xA100", 328, 1.03),
    _on(FAST_8B, "2xA100", 149.1, 1.05),
    _on(FAST_8B, "4xA100", 217.2, 1.11),
    _on(FAST_8B, "8xA100", 276, 1.17),
    _on(FAST_7B, "8xA100", 62.5, 1.04, model=m.LLAMA2_70B, name="gpt-fast, 70B BF16"),
    _on(FAST_INT4, "8xA100", 90.8, 1.19),
    _on(QWEN_9070, TWO_9070, 34.92, 0.89, shares=FIVE_FOUR),
    _on(PROMPT_31B, FOUR_4090, 2846, 0.85),
    _on(PROMPT_A4B, FOUR_4090, 3428, 0.62,
        why="sums of 8 experts by themselves; what NCCL gives there is not published"),
    _on(PROMPT_70B, TWO_5090, 1831, 1.05),
    _on(PROMPT_70B, TWO_5090, 1109, 1.26, engine=LLAMA_BUTTERFLY, why=FALLBACK),
    _on(PROMPT_3B, TWO_5090, 13594, 1.24),
    _on(PROMPT_3B, TWO_5090, 8235, 1.44, engine=LLAMA_BUTTERFLY, why=FALLBACK),
    _on(PROMPT_A3B, TWO_5090, 7687, 1.22),
    _on(PROMPT_A3B, TWO_5090, 5315, 1.46, engine=LLAMA_BUTTERFLY, why=FALLBACK),
    _on(PROMPT_IK, FOUR_3090, 1738, 1.03, model=m.LLAMA_70B, name="ik_llama.cpp#1092, 70B, pp2048"),
    _on(PROMPT_9070, TWO_9070, 427, 2.49, shares=FIVE_FOUR,
        why="a sum would take 6 ms, at 1.6 GB/s: ROCm's copies by way of the host are slow"),
    _on(PROMPT_9070, TWO_9070, 1017, 1.16, shares=FIVE_FOUR, engine=LLAMA_INTERNAL),
    _gain("ik_llama.cpp#1107, 32B, 64k, over layers", IK_LONG, 1.6, 1.18, IK_32B,
          replace(IK_LONG, mode="layer")),
    _gain("ik_llama.cpp#1080, 30B-A3B, over layers", IK_A3B_SHORT, 1.0, 1.09, IK_A3B,
          replace(IK_A3B_SHORT, mode="layer")),
    _gain("ik_llama.cpp#1080, 30B-A3B, 40k, over layers", IK_A3B_LONG, 1.18, 1.12, IK_A3B,
          replace(IK_A3B_LONG, mode="layer")),
    _gain("club-3090#928, vLLM, 27B int4, own sums over NCCL", CLUB_3090, 1.1, 1.03, VLLM_27B,
          replace(CLUB_3090, engine=VLLM_SHM)),
    _gain("club-3090#873, vLLM, 35B-A3B NVFP4, own sums over NCCL", CLUB_5090, 1.29, 1.07, None,
          replace(CLUB_5090, engine=VLLM_SHM)),
    _gain("vllm#56128, 27B FP8, own sums over NCCL", PRO_6000, 1.14, 1.09, None,
          replace(PRO_6000, engine=VLLM_PEERS)),
)  # fmt: skip
