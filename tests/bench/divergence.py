"""Divergence of the CPU's probabilities from those of the exact model.

    python -m tests.bench.divergence MODEL.gguf [--text FILE] [--tokens N]

A text's first tokens are computed twice: with the weights in F32 (`TANDEM_BACKEND=reference`), and
by the kernels, as a prompt and token by token. For each token, the Kullback-Leibler divergence of
the probabilities of the next one is KL(exact || kernels), in nats; printed are its mean, its
largest value, and how often both hold the same token for the most likely one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine import Model, load_model
from engine.hardware.backend_choice import VARIABLE
from tests.helpers.golden import REPO, Case, logits_in_steps

Logits = NDArray[np.float32]


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Return the logarithm of each token's probability, for logits (T, n_vocab)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def divergence(exact: Logits, found: Logits) -> NDArray[np.float64]:
    """Return KL(exact || found) of each row's probabilities, in nats."""
    expected = log_probabilities(exact)
    return np.asarray((np.exp(expected) * (expected - log_probabilities(found))).sum(axis=1))


def report(name: str, exact: Logits, found: Logits) -> str:
    """Return the line of one way to compute."""
    each = divergence(exact, found)
    same = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
    return f"{name}: KL {each.mean():.2e}, at most {each.max():.1e}, the same token {same:.1%}"


def _loaded(path: Path, n_ctx: int, backend: str) -> Model:
    """Load a model on one device with a backend; "" for the one of devices like this."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = backend
    if not backend:
        del os.environ[VARIABLE]
    try:
        return load_model(path, ["cpu"], n_ctx=n_ctx, kv_type="f32")
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=REPO / "README.md")
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args(argv)
    with _loaded(args.model, args.tokens, "reference") as model:
        ids = model.tokenize(args.text.read_text("utf-8"))[: args.tokens]
        exact = logits_in_steps(model, ids, Case((1,)))
    with _loaded(args.model, args.tokens, "") as model:
        for name, n_decode in (("a prompt", 0), ("token by token", len(ids))):
            found = logits_in_steps(model, ids, Case((1,), n_decode=n_decode))
            sys.stdout.write(f"{args.model.name}, {report(name, exact, found)}\n")


if __name__ == "__main__":
    main()
