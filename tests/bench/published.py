"""Predicted speed beside what others have published for several GPUs.

    python -m tests.bench.published

Models are given by their sizes, split evenly; some sizes and bytes are estimates, as the sources
name only a model and its quantisation. Sources are pull requests and issues of the projects named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.planning.load import BlockLoad, ModelLoad, RankLoad, Weights
from engine.planning.prediction import Prediction
from engine.planning.rigs import parse_rig
from engine.planning.speed import SpeedModel

SHORT_CONTEXT, LONG_CONTEXT = 512, 65_000


@dataclass(frozen=True)
class Model:
    """A decoder-only model as a token sees it.

    Attributes:
        n_ff: columns of the FFN, or of the experts that a token goes to together.
        active_gb, head_gb: bytes that a token reads, in 10⁹, of all and of the head's.
        n_ffn_op: matrices behind the mixer.
        all_experts: bytes of all experts over those of the used ones; 0 for a dense model.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    active_gb: float
    head_gb: float
    n_ffn_op: int = 3
    all_experts: float = 0.0
    kind: str = "Q4_K"

    def load(self, n: int, mode: str) -> ModelLoad:
        """Split evenly over n ranks, in every block ("tensor") or by whole blocks ("layer")."""
        width = n if mode == "tensor" else 1
        mixer, ffn = self._mixer(width), self._ffn(width)
        head = self._part(self.head_gb, 2.0 * self.n_embd * self.n_vocab, width, 1)
        if mode == "tensor":
            ranks = tuple(range(n))
            blocks = [
                BlockLoad(self.n_layer, ranks, dict.fromkeys(ranks, part), 1)
                for part in (mixer, ffn)
            ]
            return self._model(blocks, dict.fromkeys(ranks, head))
        blocks = [
            BlockLoad(self.n_layer // n + (rank < self.n_layer % n), (rank,), {rank: part}, 1)
            for rank in range(n)
            for part in (mixer, ffn)
        ]
        return self._model(blocks, {n - 1: head})

    def _model(self, blocks: list[BlockLoad], head: dict[int, RankLoad]) -> ModelLoad:
        return ModelLoad(tuple(blocks), {0: RankLoad()}, head, self.n_embd, self.n_vocab)

    def _mixer(self, n: int) -> RankLoad:
        n_weight = self._n_mixer
        part = self._part(self._gb(n_weight), 2.0 * n_weight, n, 4)
        return replace(
            part,
            kv_bytes=4 * self.n_head_kv * self.head_dim / n,  # keys and values in F16
            kv_flop=4 * self.n_head * self.head_dim / n,
        )

    def _ffn(self, n: int) -> RankLoad:
        n_weight = 3 * self.n_embd * self.n_ff
        part = self._part(self._gb(n_weight), 2.0 * n_weight, n, self.n_ffn_op)
        return replace(part, batch_bytes=self.all_experts * part.read_bytes)

    @property
    def _n_mixer(self) -> int:
        return self.n_embd * self.head_dim * 2 * (self.n_head + self.n_head_kv)

    def _gb(self, n_weight: int) -> float:
        """Of so many weights of a block, all read alike."""
        n_all = self.n_layer * (self._n_mixer + 3 * self.n_embd * self.n_ff)
        return (self.active_gb - self.head_gb) * n_weight / n_all

    def _part(self, gigabytes: float, flop: float, n: int, n_op: int) -> RankLoad:
        n_bytes = 1e9 * gigabytes / n
        weights = Weights(self.kind, n_bytes, flop / n)
        return RankLoad(n_bytes, flop / n, n_op=n_op, kinds=(weights,))


LLAMA_1B = Model(16, 2048, 32, 8, 64, 8192, 128256, 2.47, 0.525, kind="F16")
GEMMA_31B = Model(60, 5376, 32, 16, 128, 21504, 262144, 18.5, 1.15)
GEMMA_26B_A4B = Model(30, 2816, 16, 8, 256, 2816, 262144, 2.6, 0.6, 6, 6.0)
GPT_OSS_120B = Model(36, 2880, 64, 8, 64, 11520, 201088, 3.53, 0.62, 4, 20.0)
LLAMA_70B = Model(80, 8192, 64, 8, 128, 28672, 128256, 41.9, 0.86)
QWEN_27B = Model(64, 5120, 40, 8, 128, 17408, 248320, 16.2, 1.04)
QWEN_27B_INT4 = replace(QWEN_27B, active_gb=15.5)
QWEN_32B = Model(64, 5120, 64, 8, 128, 25600, 151936, 19.2, 0.64)
QWEN_35B_A3B = Model(40, 2048, 16, 2, 256, 4608, 248320, 1.9, 0.45, 6, 10.0)
LLAMA_7B = Model(32, 4096, 32, 32, 128, 11008, 32000, 13.2, 0.26, kind="BF16")
LLAMA_70B_INT4 = replace(LLAMA_70B, n_vocab=32000, active_gb=38.6, head_gb=0.15)

ROWS: tuple[tuple[str, str, Model, str, float, bool], ...] = (
    ("llama.cpp#19378, 1B F16", "4090", LLAMA_1B, "tensor", 315, False),
    ("llama.cpp#19378, 1B F16", "4x4090@shm", LLAMA_1B, "tensor", 410, False),
    ("llama.cpp#19378, 31B Q4_K_M", "4x4090@shm", GEMMA_31B, "layer", 43.8, False),
    ("llama.cpp#19378, 31B Q4_K_M", "4x4090@shm", GEMMA_31B, "tensor", 59.5, False),
    ("llama.cpp#19378, 26B-A4B", "4x4090@shm", GEMMA_26B_A4B, "layer", 197, False),
    ("llama.cpp#19378, 26B-A4B", "4x4090@shm", GEMMA_26B_A4B, "tensor", 139, False),
    ("llama.cpp#19378, gpt-oss-120B", "4x4090@shm", GPT_OSS_120B, "layer", 180, False),
    ("llama.cpp#19378, gpt-oss-120B", "4x4090@shm", GPT_OSS_120B, "tensor", 180, False),
    ("llama.cpp#22299, 70B Q4_K_M, pp512", "2x5090@host", LLAMA_70B, "layer", 1737, True),
    ("llama.cpp#22299, 70B Q4_K_M, pp512", "2x5090@host", LLAMA_70B, "tensor", 1831, True),
    ("qwen38-mtp#73, 27B Q4_K_M", "5090", QWEN_27B, "tensor", 76.7, False),
    ("qwen38-mtp#73, 27B Q4_K_M", "2x5090@host", QWEN_27B, "tensor", 107.5, False),
    ("ik_llama.cpp#1057, 70B", "4x3090@p2p", LLAMA_70B, "tensor", 48.6, False),
    ("ik_llama.cpp#1092, 70B, pp512", "4x3090@p2p", LLAMA_70B, "tensor", 1738, True),
    ("vLLM, 27B int4", "3090", QWEN_27B_INT4, "tensor", 46, False),
    ("vLLM, 27B int4", "2x3090@shm", QWEN_27B_INT4, "tensor", 69.5, False),
    ("vLLM, 27B int4", "4x3090@shm", QWEN_27B_INT4, "tensor", 85.8, False),
    ("vLLM, 35B-A3B, NCCL", "2x5090@shm", QWEN_35B_A3B, "tensor", 222.8, False),
    ("vLLM, 35B-A3B, own sums", "2x5090@p2p", QWEN_35B_A3B, "tensor", 288, False),
    ("gpt-fast, 7B BF16", "1xA100", LLAMA_7B, "tensor", 104.9, False),
    ("gpt-fast, 7B BF16", "2xA100", LLAMA_7B, "tensor", 168.8, False),
    ("gpt-fast, 7B BF16", "4xA100", LLAMA_7B, "tensor", 254, False),
    ("gpt-fast, 7B BF16", "8xA100", LLAMA_7B, "tensor", 328, False),
    ("gpt-fast, 70B int4", "1xA100", LLAMA_70B_INT4, "tensor", 25.3, False),
    ("gpt-fast, 70B int4", "8xA100", LLAMA_70B_INT4, "tensor", 90.8, False),
)
"""What was measured, on what, the split, tokens/s, and whether it is a prompt of 512 tokens."""


def predicted(
    rig_text: str, model: Model, mode: str, *, is_prompt: bool = False, context: int = SHORT_CONTEXT
) -> Prediction:
    """One row's speed."""
    rig = parse_rig(rig_text)
    facts = [rig.facts[device.id] for device in rig.devices if device.kind == "cuda"]
    speed, load = SpeedModel(facts, rig.links), model.load(len(facts), mode)
    if is_prompt:
        return speed.prefill(load, SHORT_CONTEXT, SHORT_CONTEXT)
    return speed.decode(load, context)


def lines() -> Iterator[str]:
    """The table."""
    yield "| source, model | rig, split | published | predicted | ratio |"
    yield "|---|---|---|---|---|"
    for name, rig, model, mode, published, is_prompt in ROWS:
        speed = predicted(rig, model, mode, is_prompt=is_prompt).tokens_per_s
        row = (name, f"{rig}, {mode}", f"{published:g}", f"{speed:.4g}", f"{speed / published:.2f}")
        yield f"| {' | '.join(row)} |"
    gain = [
        predicted("2x3090@shm", QWEN_32B, mode, context=LONG_CONTEXT).tokens_per_s
        for mode in ("tensor", "layer")
    ]
    row = ("ik_llama.cpp#1107, 32B, 64k", "2x3090@shm, tensor over layer", "1.6")
    yield f"| {' | '.join(row)} | {gain[0] / gain[1]:.2f} | {gain[0] / gain[1] / 1.6:.2f} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
