"""Cost of a form: time of a mask, and the speed of answers with one beside those without.

    python -m tests.bench.constrained FILE [-n 64] [--rounds 5] [--masks-only]

Masks are timed along a random text of the form. Answers with and without a form come by turns; the
form allows any long text in JSON, so that both have the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from engine import Finished, Grammar, Model, SamplingParams, load_model, load_tokenizer
from engine.decoding.grammar.matcher import MaskVocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["red", "green", "blue"]},
        "parts": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 20},
    },
    "required": ["name", "size", "kind", "parts"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 1}


def mask_report(path: str) -> str:
    """Return what masks of a model's vocabulary cost, in a line."""
    begun = time.perf_counter()
    vocabulary = MaskVocabulary(load_tokenizer(path))
    vocabulary.matcher(Grammar("regex", "a"))
    built, grammar = time.perf_counter(), Grammar("json_schema", json.dumps(SCHEMA))
    times, rng = list[float](), np.random.default_rng(1)
    for _ in range(20):
        matcher = vocabulary.matcher(grammar)
        for _ in range(100):
            start = time.perf_counter()
            mask = matcher.allowed()
            times.append(time.perf_counter() - start)
            if matcher.is_over:
                break
            token = int(rng.choice(np.flatnonzero(mask)))
            if token in vocabulary.eog_ids:
                break
            matcher.accept(token)
    middle, worst = statistics.median(times) * 1e6, max(times) * 1e3
    return (
        f"{Path(path).name}: {vocabulary.n} tokens, vocabulary {built - begun:.2f} s, "
        f"mask {middle:.0f} us in the median, {worst:.1f} ms at worst, of {len(times)}"
    )


def speed(model: Model, n: int, schema: object) -> float:
    """Return the tokens per second of an answer's decode."""
    written = json.dumps(schema) if schema else ""
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=n, ignore_eos=True, json_schema=written
    )
    last = list(model.generate("Once upon a time", params))[-1]
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens == n
    return last.timings.decode_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--masks-only", action="store_true")
    args = parser.parse_args()
    say = sys.stdout.write
    say(mask_report(args.file) + "\n")
    if args.masks_only:
        return
    with load_model(args.file, n_ctx=512) as model:
        speed(model, 8, LONG)
        ratios = list[float]()
        for _ in range(args.rounds):
            free, held = speed(model, args.n, None), speed(model, args.n, LONG)
            ratios.append(held / free)
            say(f"without {free:.1f} t/s, with {held:.1f} t/s: {held / free:.2f}\n")
        say(f"median of the ratios: {statistics.median(ratios):.2f}\n")


if __name__ == "__main__":
    main()
