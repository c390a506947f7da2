"""Renders generated templates that try to hang or to fill the process that renders them.

    python -m tests.fuzz.template_attacker 300 --seed 1

prints each outcome, and what the longest and the largest took.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from engine.errors import TemplateError
from engine.text.chat_template import ChatTemplate
from tests.helpers.peak_memory import PeakMemory
from tests.helpers.template_attacks import (
    DEEP_SOURCES,
    FILLS,
    NUMBERS,
    SEARCHES,
    comparisons,
    long_sources,
    sized,
)

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]

PLACES = (
    "ATTACK",
    "{% macro m() %}ATTACK{% endmacro %}{{ m() }}",
    "{% for m in messages %}ATTACK{% endfor %}",
    "{% set x %}ATTACK{% endset %}{{ x }}",
    "{% filter upper %}ATTACK{% endfilter %}",
    "{% if messages %}{% block b %}ATTACK{% endblock %}{% endif %}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}ATTACK{% endcall %}",
    "{% with %}{% generation %}ATTACK{% endgeneration %}{% endwith %}",
    CHATML + "ATTACK",
)
"""Templates with an attack at different places."""


@dataclass(frozen=True)
class Outcome:
    """What became of an attack.

    Attributes:
        sentence: the error, "" if the template was rendered.
    """

    name: str
    sentence: str
    seconds: float
    peak_bytes: int


def attacks(n: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield names and sources of `n` attacks, of all kinds, drawn at random."""
    draw = random.Random(seed)
    for _ in range(n):
        kind = draw.randrange(6)
        if kind in (0, 1):
            pool = list(comparisons(draw.randrange(34, 90)))
        elif kind == 2:
            pool = list(
                chain(
                    sized(NUMBERS, draw.randrange(10**8, 10**10)),
                    sized(SEARCHES, draw.randrange(3_000_000, 8_000_000)),
                )
            )
        elif kind == 3:
            pool = list(sized(FILLS, draw.randrange(600, 800)))
        elif kind == 4:
            n_chars = draw.randrange(100_000, (128 << 10) - 400)
            pool = [(a, b + "{{ missing.name }}") for a, b in long_sources(n_chars)]
        else:
            pool = list(DEEP_SOURCES.items())
        name, source = draw.choice(pool)
        place = draw.choice(PLACES)
        yield name, place.replace("ATTACK", source)


def tried(name: str, source: str) -> Outcome:
    """Render a template and return what became of it."""
    ChatTemplate("{{ 1 }}").render(HELLO)  # the process is there
    sentence = ""
    with PeakMemory() as memory:
        started = time.monotonic()
        try:
            ChatTemplate(source).render(HELLO)
        except TemplateError as error:
            sentence = str(error)
        seconds = time.monotonic() - started
    return Outcome(name, sentence, seconds, memory.peak_bytes)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = []
    for name, source in attacks(args.n, args.seed):
        outcome = tried(name, source)
        outcomes.append(outcome)
        size = outcome.peak_bytes >> 20
        sys.stdout.write(f"{outcome.seconds:.2f} s {size} MiB  {name}: {outcome.sentence}\n")
        sys.stdout.flush()
    rendered = [outcome.name for outcome in outcomes if not outcome.sentence]
    longest = max(outcome.seconds for outcome in outcomes)
    largest = max(outcome.peak_bytes for outcome in outcomes) >> 20
    for sentence, count in Counter(o.sentence[:80] for o in outcomes).most_common(12):
        sys.stdout.write(f"{count:4} {sentence}\n")
    sys.stdout.write(f"longest {longest:.2f} s, largest {largest} MiB, rendered: {rendered}\n")


if __name__ == "__main__":
    main()
