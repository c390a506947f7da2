"""Prints how close every reference model comes to llama.cpp's logits, on every kind of split.

    python -m tests.golden_table [PART OF A NAME ...]

The exit status is 1 if any error is above the tolerance.
"""

import sys

from engine import EngineError
from tests.helpers.golden import CASES, TOLERANCE, golden_error, golden_models


def say(*parts: object) -> None:
    sys.stdout.write(" ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


def main(wanted: list[str]) -> int:
    found = golden_models().items()
    models = [(n, a) for n, a in found if not wanted or any(w in n for w in wanted)]
    for number, case in enumerate(CASES, start=1):
        say(f"({number}) {case}")
    say(f"\n{'model':30} {'architecture':15}" + "".join(f"{f'({n + 1})':>9}" for n in range(6)))
    n_bad = 0
    for name, architecture in models:
        line = f"{name:30.30} {architecture:15}"
        for case in CASES:
            try:
                error = golden_error(name, case)
            except EngineError as refusal:
                say(line, refusal)
                n_bad += 1
                break
            n_bad += not error <= TOLERANCE
            line += f" {error:8.1e}"
        else:
            say(line)
    say(f"\n{len(models)} models, {n_bad} errors above {TOLERANCE:g} (NMSE)")
    return bool(n_bad) or not models


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
