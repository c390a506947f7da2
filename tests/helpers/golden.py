"""Access to the reference data: models with logits, vocabularies, templates, broken files."""

import json
import os
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import load_model
from tests.helpers.passes import forward_alone

REPO = Path(__file__).resolve().parents[2]

TOLERANCE = 1e-5
"""Largest NMSE: weights are exact; what remains is the order of additions (and a GELU table)."""


@dataclass(frozen=True)
class Case:
    """A way to run a model.

    Attributes:
        split: share of each rank.
        mode: split mode.
        chunk: number of prompt tokens that are computed at once; 0 for all.
        n_decode: number of tokens at the end that are computed one by one.
    """

    split: tuple[float, ...]
    mode: str = "tensor"
    chunk: int = 0
    n_decode: int = 0

    def __str__(self) -> str:
        split = ":".join(f"{share:g}" for share in self.split)
        steps = f" {self.chunk} at a time" if self.chunk else ""
        decode = f", last {self.n_decode} singly" if self.n_decode else ""
        mode = {"tensor": "", "layer": " by layers", "groups": " by groups"}[self.mode]
        return f"{split}{mode}{steps}{decode}"


CASES = (
    Case((1,)),
    Case((1, 1)),
    Case((1, 1, 1)),
    Case((3, 1, 2), chunk=7, n_decode=8),
    Case((5, 0, 1), chunk=11, n_decode=5),
    Case((2, 1), mode="layer", chunk=5, n_decode=6),
)


def golden_root() -> Path:
    return Path(os.environ.get("TANDEM_GOLDEN", REPO.parent / "shared" / "golden"))


def golden_path(*parts: str) -> Path:
    """Return the path of a reference file; skip the test if the set is not on this machine."""
    path = golden_root().joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no reference data at {path} (set TANDEM_GOLDEN to its folder)")
    return path


def golden_models() -> dict[str, str]:
    """Return the architecture of each model with logits, by name; none without the set."""
    return {Path(entry["file"]).stem: entry["arch"] for entry in _entries()}


def routed_models() -> set[str]:
    """Return the names of the models with logits that have experts."""
    return {Path(entry["file"]).stem for entry in _entries() if entry["experts"]}


MIN_BAR = 1e-3
"""Smallest NMSE to allow for rounded activations."""


def kernel_bars() -> dict[str, float]:
    """Return the NMSE of llama.cpp's rounded activations, by model; at least `MIN_BAR`."""
    key = "libllama_quantised_activations_nmse"
    return {Path(entry["file"]).stem: max(MIN_BAR, entry[key]) for entry in _entries()}


def _entries() -> list[dict[str, Any]]:
    manifest = golden_root() / "MANIFEST.json"
    if not manifest.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))
    return entries


def nmse(a: Any, b: Any) -> float:
    """Return the mean squared error of `a` over the mean square of the reference `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(((a - b) ** 2).mean() / (b**2).mean())


def golden_logits(name: str) -> tuple[list[int], Any]:
    """Return token ids, and the logits after each that the model in the file `name` must have."""
    with np.load(golden_path(f"{name}.npz")) as data:
        return data["tokens"].tolist(), data["logits"]


def golden_error(name: str, case: Case, path: Path | None = None, **options: Any) -> float:
    """Return the NMSE of the logits of all tokens of one model, run in one way.

    Args:
        path: path of another file with the same model; None for the file called `name`.
    """
    tokens, expected = golden_logits(name)
    path, devices = path or golden_path(f"{name}.gguf"), ["cpu"] * len(case.split)
    options = {"kv_type": "f32", "n_ctx": len(tokens)} | options
    with load_model(path, devices, case.split, split_mode=case.mode, **options) as model:
        return nmse(logits_in_steps(model, tokens, case), expected)


def logits_in_steps(model: Any, ids: list[int], case: Case) -> Any:
    """Return the logits of all tokens (T, n_vocab), computed in the batches of a case."""
    n_prompt, rows, start = len(ids) - case.n_decode, [], 0
    chunk = case.chunk or n_prompt or 1
    sizes = chain(repeat(chunk, n_prompt // chunk), [n_prompt % chunk], repeat(1, case.n_decode))
    for size in filter(None, sizes):
        some = ids[start : start + size]
        rows.append(forward_alone(model.runtime.runner, some, start))
        start += size
    assert start == len(ids)
    return np.concatenate(rows)
