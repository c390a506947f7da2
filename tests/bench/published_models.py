"""Sizes of models whose speed was published.

Bytes are estimates where a source names only a model and its quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.planning.evaluation.workload import BlockWorkload, ModelWorkload, RankWorkload, Weights


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only model, as far as a token's cost depends on them.

    Attributes:
        n_ff: number of columns of the FFN, or of all experts that a token uses.
        active_gb: gigabytes (10⁹) of all weights that a token reads.
        head_gb: gigabytes (10⁹) of the output head.
        n_ffn_op: number of matrices in a block after the mixer.
        all_experts: bytes of all experts over the bytes of the used ones; 0 for a dense model.
        kind: GGML type that stands for most weights.
        cache: bytes of keys and values over those of F16 in all blocks.
        n_ffn_sum: number of all-reduces in a block after the mixer, in decode.
        n_prompt_sum: number of all-reduces in a block after the mixer, in prefill.
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
    cache: float = 1.0
    n_ffn_sum: int = 1
    n_prompt_sum: int = 1

    def load(self, shares: Sequence[float], mode: str, *, is_prompt: bool = False) -> ModelWorkload:
        """Return the work of a split by shares, in each block ("tensor") or by blocks ("layer")."""
        mixer, ffn = self._mixer(), self._ffn()
        head = self._part(self.head_gb, 2.0 * self.n_embd * self.n_vocab, 1)
        n_sum = self.n_prompt_sum if is_prompt else self.n_ffn_sum
        ranks = tuple(range(len(shares)))
        if mode == "tensor":
            blocks = [
                BlockWorkload(self.n_layer, ranks, _cut(part, shares), n)
                for part, n in ((mixer, 1), (ffn, n_sum))
            ]
            return self._model(blocks, _cut(head, shares))
        counts = _whole(self.n_layer, shares)
        blocks = [
            BlockWorkload(counts[rank], (rank,), {rank: part}, 1)
            for rank in ranks
            for part in (mixer, ffn)
        ]
        return self._model(blocks, {ranks[-1]: head})

    def _model(self, blocks: list[BlockWorkload], head: dict[int, RankWorkload]) -> ModelWorkload:
        return ModelWorkload(tuple(blocks), {0: RankWorkload()}, head, self.n_embd, self.n_vocab)

    def _mixer(self) -> RankWorkload:
        n_weight = self._n_mixer
        return replace(
            self._part(self._gb(n_weight), 2.0 * n_weight, 4),
            kv_bytes=4 * self.n_head_kv * self.head_dim * self.cache,
            kv_flop=4 * self.n_head * self.head_dim * min(1.0, self.cache),
        )

    def _ffn(self) -> RankWorkload:
        n_weight = 3 * self.n_embd * self.n_ff
        part = self._part(self._gb(n_weight), 2.0 * n_weight, self.n_ffn_op)
        return replace(part, batch_bytes=self.all_experts * part.read_bytes)

    @property
    def _n_mixer(self) -> int:
        return self.n_embd * self.head_dim * 2 * (self.n_head + self.n_head_kv)

    def _gb(self, n_weight: int) -> float:
        """Return the gigabytes of `n_weight` weights of a block, all stored alike."""
        n_all = self.n_layer * (self._n_mixer + 3 * self.n_embd * self.n_ff)
        return (self.active_gb - self.head_gb) * n_weight / n_all

    def _part(self, gigabytes: float, flop: float, n_op: int) -> RankWorkload:
        n_bytes = 1e9 * gigabytes
        return RankWorkload(n_bytes, flop, n_op=n_op, kinds=(Weights(self.kind, n_bytes, flop),))


def _cut(part: RankWorkload, shares: Sequence[float]) -> dict[int, RankWorkload]:
    """Return each rank's part of the work of a block."""
    found = {}
    for rank, share in enumerate(shares):
        found[rank] = replace(
            part,
            read_bytes=share * part.read_bytes,
            flop=share * part.flop,
            kv_bytes=share * part.kv_bytes,
            kv_flop=share * part.kv_flop,
            batch_bytes=share * part.batch_bytes,
            kinds=tuple(Weights(k, share * n, share * f) for k, n, f in part.kinds),
        )
    return found


def _whole(n: int, shares: Sequence[float]) -> list[int]:
    """Return the number of blocks of each rank."""
    ends = [round(n * sum(shares[: rank + 1])) for rank in range(len(shares))]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


LLAMA_1B = Model(16, 2048, 32, 8, 64, 8192, 128256, 2.47, 0.525, kind="F16")
LLAMA_3B = Model(28, 3072, 24, 8, 128, 8192, 128256, 3.41, 0.42, kind="Q8_0")
LLAMA_7B = Model(32, 4096, 32, 32, 128, 11008, 32000, 13.2, 0.26, kind="BF16")
LLAMA_8B = Model(32, 4096, 32, 8, 128, 14336, 128256, 15.0, 1.05, kind="BF16")
LLAMA_70B = Model(80, 8192, 64, 8, 128, 28672, 128256, 41.9, 0.86)
LLAMA2_70B = replace(LLAMA_70B, n_vocab=32000, active_gb=137.4, head_gb=0.52, kind="BF16")
LLAMA2_70B_INT4 = replace(LLAMA2_70B, active_gb=43.5, head_gb=0.16, kind="Q4_K")
"""Llama 2 70B in groups of 32 with two numbers of two bytes: 25.25 tokens/s are 1097.66 GB/s, as
published."""

QWEN_27B = Model(64, 5120, 40, 8, 128, 17408, 248320, 16.2, 1.04, cache=0.25)
QWEN_27B_INT4 = replace(QWEN_27B, active_gb=15.5)
QWEN_27B_FP8 = replace(QWEN_27B, active_gb=27.8, head_gb=2.5, kind="BF16")
QWEN_27B_Q4_0_CACHE = replace(QWEN_27B, active_gb=15.4, cache=0.07)
QWEN_32B = Model(64, 5120, 64, 8, 128, 25600, 151936, 19.2, 0.64)

GEMMA_31B = Model(60, 5376, 32, 16, 128, 21504, 262144, 18.5, 1.15)
GEMMA_26B_A4B = Model(
    30, 2816, 16, 8, 256, 7744, 262144, 2.6, 0.6, 6, 11.9, n_ffn_sum=2, n_prompt_sum=9
)
"""Gemma 26B A4B. Its dense FFN and its experts have a norm each, so an all-reduce each; and the
result of each of the 8 experts was all-reduced by itself then (llama.cpp#22129)."""

GPT_OSS_120B = Model(36, 2880, 64, 8, 64, 11520, 201088, 3.53, 0.62, 4, 32.0)
QWEN_30B_A3B = Model(48, 2048, 32, 4, 128, 6144, 151936, 1.95, 0.26, 4, 16.0)
QWEN_35B_A3B = Model(40, 2048, 16, 2, 256, 4608, 248320, 1.9, 0.45, 6, 28.0, cache=0.25)
QWEN_35B_A3B_Q8 = replace(QWEN_35B_A3B, active_gb=3.3, head_gb=0.54, kind="Q8_0")
