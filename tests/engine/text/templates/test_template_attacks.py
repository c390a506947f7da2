"""Templates that hang inside C, or fill the memory: each ends in one sentence."""

import re
import time
from itertools import chain

import pytest

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
from tests.helpers.tiers import swept

HELLO = [{"role": "user", "content": "Hello"}]
MIB = 1 << 20

HANGS = dict(chain(comparisons(60), sized(NUMBERS, 10**9), sized(SEARCHES, 4_000_000)))
"""Templates that do not end, by name."""

QUICK_HANGS = (
    "equal of lists, 60 deep", "less of lists, 60 deep", "in of tuples, 60 deep",
    "index of dicts, 60 deep", "sort of tuples, 60 deep", "key of tuples, 60 deep",
    "unique of tuples, 60 deep", "groupby of lists, 60 deep", "select of dicts, 60 deep",
    "int round, 1000000000", "rfind, 4000000", "strip, 4000000",
)  # fmt: skip

LARGE = dict(sized(FILLS, 700))
"""Templates that make gigabytes, by name."""

QUICK_LARGE = [
    f"{name}, 700"
    for name in ("format method", "format of names", "format_map", "format filter", "percent",
                 "mapped format", "tojson", "tojson separators")
]  # fmt: skip

QUICK_DEEP = ("not", "minus", "lists", "ifs", "loops", "filters")

LONG = dict(long_sources((128 << 10) - 20))
"""Templates that take long to compile, by name."""

QUICK_LONG = list(LONG)[:1]


def outcome(source: str, seconds: float) -> str:
    """Return the sentence that a template ends with, and check that it is one, soon and small."""
    ChatTemplate("{{ 1 }}").render(HELLO)  # the process is there
    with PeakMemory() as memory:
        started = time.monotonic()
        with pytest.raises(TemplateError) as raised:
            ChatTemplate(source, max_seconds=seconds).render(HELLO)
        took = time.monotonic() - started
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert took < seconds + 1  # it is killed after 0.25; the rest is for a busy machine
    assert memory.peak_bytes < 600 * MIB
    return sentence


@pytest.mark.parametrize(
    "name", swept(["round, 1000000000", "equal of lists, 60 deep"], ["round, 1000000000"])
)
def test_a_template_that_hangs_inside_c_is_ended_after_two_seconds(name: str) -> None:
    assert "runs for more than 2 seconds" in outcome(HANGS[name], seconds=2)


@pytest.mark.parametrize("name", swept(HANGS, QUICK_HANGS))
def test_whatever_hangs_is_ended(name: str) -> None:
    assert "runs for more than 0.05 seconds" in outcome(HANGS[name], seconds=0.05)


@pytest.mark.parametrize("name", swept(LARGE, QUICK_LARGE))
def test_what_would_fill_the_memory_is_ended(name: str) -> None:
    sentence = outcome(LARGE[name], seconds=2)
    assert re.search(r"more than (512 MiB|2 seconds)|produces text that is too long", sentence)


@pytest.mark.parametrize("name", swept(DEEP_SOURCES, QUICK_DEEP))
def test_a_source_that_is_nested_deeply_is_one_sentence(name: str) -> None:
    assert "does not work: " in outcome(DEEP_SOURCES[name], seconds=2)


@pytest.mark.parametrize("name", swept(LONG, QUICK_LONG))
def test_the_longest_sources_are_compiled_or_refused_in_time(name: str) -> None:
    assert "does not work: " in outcome(LONG[name] + "{{ missing.name }}", seconds=2)
