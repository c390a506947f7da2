"""Views that split fused tensors of a file into those that models declare.

Rows can be cut anywhere, so a view is an offset; no bytes are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import InvalidGGUF

if TYPE_CHECKING:
    from engine.model.layers.hparams import HParams
    from engine.model.layers.module import TensorSource

Parts = tuple[tuple[str, int], ...]
"""Names and numbers of rows of a fused tensor's parts, in file order."""


def separate(source: TensorSource, fused: str, parts: Parts, columns: tuple[int, ...]) -> None:
    """Split the matrix `fused`, its bias and its scale into views of its parts.

    Raises:
        InvalidGGUF: it has another shape, a part of a bias ends inside a quantised block, or the
            file has a part a second time.
    """
    n_rows = sum(rows for _, rows in parts)
    for kind, shape in (("weight", (n_rows, *columns)), ("bias", (n_rows,))):
        name = f"{fused}.{kind}"
        if name not in source:
            continue
        whole = source.get(name, shape)
        start = 0
        for part, rows in parts:
            try:
                view = whole.rows(start, start + rows, f"{part}.{kind}")
            except ValueError as error:
                raise InvalidGGUF(source.path, f"{name} cannot be taken apart ({error})") from None
            source.add_view(view, name)
            start += rows
    if f"{fused}.scale" in source:
        scale = source.get(f"{fused}.scale", (1,))
        source.tensors |= {f"{part}.scale": scale for part, _ in parts}


def separate_qkv(source: TensorSource, hp: HParams, layer: int) -> None:
    """Split a fused `attn_qkv` (rows q, then k, then v) into three tensors.

    Each head's rows of q may be followed by as many rows of a gate.
    """
    if hp.recurrent[layer] or not hp.has(layer, "attn_qkv.weight"):
        return
    block = f"blk.{layer}."
    n_q = hp.n_head[layer] * hp.head_dim_k[layer]
    n_k = hp.n_head_kv[layer] * hp.head_dim_k[layer]
    n_v = hp.n_head_kv[layer] * hp.head_dim_v[layer]
    if source.tensors[f"{block}attn_qkv.weight"].shape[0] == 2 * n_q + n_k + n_v:
        n_q *= 2
    parts = ((f"{block}attn_q", n_q), (f"{block}attn_k", n_k), (f"{block}attn_v", n_v))
    separate(source, f"{block}attn_qkv", parts, (hp.n_embd,))


def separate_gate_up(source: TensorSource, hp: HParams, layer: int) -> None:
    """Split an `ffn_up` of twice the columns (rows gate, then up) into two tensors.

    The shared expert's matrix is split likewise.
    """
    for suffix, n_ff in (("", hp.n_ff[layer]), ("_shexp", hp.n_ff_shexp[layer])):
        gate, up = f"blk.{layer}.ffn_gate{suffix}", f"blk.{layer}.ffn_up{suffix}"
        weight = source.tensors.get(f"{up}.weight")
        if n_ff and weight is not None and weight.shape[0] == 2 * n_ff:
            separate(source, up, ((gate, n_ff), (up, n_ff)), (hp.n_embd,))
