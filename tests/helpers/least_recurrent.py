"""Models with recurrent layers that three ranks can share, small enough to be interpreted."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tiny_gguf import least_gguf

N = 32
"""Size of the residual stream, and number of channels of each recurrent layer."""

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FFN = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def least_recurrent_gguf(path: Path, arch: str) -> Path:
    """Write a model of two layers with random weights, and return `path`.

    Args:
        arch: "lfm2", a convolution and attention; "qwen35", a delta net and attention; "mamba" or
            "mamba2".
    """
    rng = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray:
        made = rng.standard_normal(shape, dtype=np.float32)
        return 1 + 0.1 * made if len(shape) == 1 else made / np.float32(np.sqrt(shape[-1]))

    def rates(*shape: int) -> np.ndarray:
        return -np.abs(matrix(*shape)) - np.float32(0.1)

    meta: dict[str, Any] = {}
    layers: list[dict[str, np.ndarray | None]] = [{}, {}]
    without: dict[str, np.ndarray | None] = {f"{name}.weight": None for name in ATTENTION}
    ssm = {"ssm.conv_kernel": 4, "ssm.inner_size": N, "ssm.state_size": 16}
    if arch == "lfm2":
        meta = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]}
        layers[0] = without | {
            "shortconv.in_proj.weight": matrix(3 * N, N), "shortconv.conv.weight": matrix(N, 3),
            "shortconv.out_proj.weight": matrix(N, N),
        }  # fmt: skip
        layers[1] = {f"attn_{part}_norm.weight": matrix(16) for part in "qk"}
    elif arch == "qwen35":
        meta = ssm | {"ssm.time_step_rank": 2, "ssm.group_count": 1}
        meta["attention.recurrent_layers"] = [True, False]
        layers[0] = without | {
            "attn_qkv.weight": matrix(2 * 16 + N, N), "attn_gate.weight": matrix(N, N),
            "ssm_conv1d.weight": matrix(2 * 16 + N, 4), "ssm_dt.bias": matrix(2),
            "ssm_a": rates(2), "ssm_alpha.weight": matrix(2, N), "ssm_beta.weight": matrix(2, N),
            "ssm_norm.weight": matrix(16), "ssm_out.weight": matrix(N, N),
        }  # fmt: skip
        layers[1] = {"attn_q.weight": matrix(2 * N, N)}
        layers[1] |= {f"attn_{part}_norm.weight": matrix(16) for part in "qk"}
        for layer in layers:
            layer |= {"ffn_norm.weight": None, "post_attention_norm.weight": matrix(N)}
    else:
        without |= {f"{name}.weight": None for name in FFN}
        meta = ssm | {"ssm.time_step_rank": 2, "ssm.group_count": 1}
        for n in range(2):
            layers[n] = without | (_mamba2 if arch == "mamba2" else _mamba)(matrix, rates)
    extra = {f"{arch}.{key}": value for key, value in meta.items()}
    for n, layer in enumerate(layers):
        extra |= {f"blk.{n}.{name}": value for name, value in layer.items()}
    if arch == "lfm2":
        extra |= {"output_norm.weight": None, "token_embd_norm.weight": matrix(N)}
    return least_gguf(path, arch=arch, n_layer=2, extra=extra)


def _mamba(matrix: Any, rates: Any) -> dict[str, np.ndarray]:
    return {
        "ssm_in.weight": matrix(2 * N, N), "ssm_conv1d.weight": matrix(N, 4),
        "ssm_conv1d.bias": matrix(N), "ssm_x.weight": matrix(2 + 2 * 16, N),
        "ssm_dt.weight": matrix(N, 2), "ssm_dt.bias": matrix(N), "ssm_a": rates(N, 16),
        "ssm_d": matrix(N), "ssm_out.weight": matrix(N, N),
    }  # fmt: skip


def _mamba2(matrix: Any, rates: Any) -> dict[str, np.ndarray]:
    mixed = N + 2 * 16
    return {
        "ssm_in.weight": matrix(N + mixed + 2, N), "ssm_conv1d.weight": matrix(mixed, 4),
        "ssm_conv1d.bias": matrix(mixed), "ssm_dt.bias": matrix(2), "ssm_a": rates(2, 1),
        "ssm_d": matrix(2, 1), "ssm_norm.weight": matrix(1, N), "ssm_out.weight": matrix(N, N),
    }  # fmt: skip
