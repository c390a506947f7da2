"""Speed of answers with guesses from the text, or of a draft model, beside that without.

    python -m tests.bench.drafts FILE [--draft FILE] [-n 200] [--rounds 3]

Prompts ask for code that they quote, as it is or edited, and are answered greedily; another begins
a story, which goes on at random. In each round every prompt is answered without and with guesses;
what counts is the median of the rounds' ratios. The texts must be the same. Random models quote
nothing, so the first prompts say little of them; `quoting` writes one that edits this code.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from engine import Finished, Model, SamplingParams, TokenText, load_model
from engine.generation.drafts import Drafts

CODE = '''def area(shape):
    """Return the area of a shape."""
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    if shape.kind == "triangle":
        return 0.5 * shape.base * shape.height
    raise ValueError(f"unknown shape {shape.kind}")
'''

QUOTED = f"```python\n{CODE}```\nHere it is again:\n```python\ndef area"

PROMPTS = {
    "quoting": (f"Repeat this code exactly:\n{QUOTED}", 0.0),
    "editing": (f'Replace "kind" by "name" in this code:\n{QUOTED}', 0.0),
    "new prose": ("Once upon a time there was a small village at the edge of a", 0.8),
}
"""Prompts and their temperatures."""


def answered(model: Model, prompt: str, temperature: float, n: int) -> tuple[list[int], Finished]:
    """Return the tokens of an answer, and its end."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=n)
    ids, end = list[int](), None
    for event in model.generate(prompt, params):
        if isinstance(event, TokenText):
            ids += event.ids
        elif isinstance(event, Finished):
            end = event
    assert end is not None
    return ids, end


def main() -> None:
    """Measure, and print a line for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--draft", default="auto", help="file of a draft model")
    parser.add_argument("-n", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with load_model(args.file, n_ctx=2048, draft=args.draft) as model:
        guessing = model.scheduler.drafts
        for name, (prompt, temperature) in PROMPTS.items():
            ratios, speeds, counts = list[float](), list[float](), ""
            answered(model, prompt, temperature, 16)  # records
            for _ in range(args.rounds):
                model.scheduler.drafts = Drafts()
                plain, end = answered(model, prompt, temperature, args.n)
                before = end.timings.decode_per_s
                model.scheduler.drafts = guessing
                ids, end = answered(model, prompt, temperature, args.n)
                assert ids == plain, "guesses have changed the text"
                speeds.append(end.timings.decode_per_s)
                ratios.append(end.timings.decode_per_s / before)
                counts = f"{end.usage.n_accepted} of {end.usage.n_drafted} guesses right"
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            sys.stdout.write(
                f"{name}: {median(speeds):.1f} tok/s, {median(ratios):.2f} times as fast"
                f" ({each}), {len(ids)} tokens, {counts}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
