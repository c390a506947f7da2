"""The conversations that the demo model learns: written questions and answers, varied by chance.

A conversation is a list of messages as a chat template takes them. Everything is drawn from one
`random.Random`, so a seed gives the same conversations. Some wordings are held out: they are never
drawn for training, only for the evaluation.
"""

import itertools
import random
import re
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FACT_FILES = ("tandem.toml", "parallel.toml", "models.toml", "smalltalk.toml")
OUTSIDE_WEIGHTS = {
    "general": 50, "code": 9, "maths": 9, "translate": 7, "write": 9, "foreign": 9, "gibberish": 7,
}  # fmt: skip
N_CORE = 3  # questions of a fact that come more often than others and are never held out
HELD_OUT_PART = 9  # one wording of so many is held out

Message = dict[str, str]


def is_held_out(text: str) -> bool:
    """Whether a wording belongs to the evaluation; depends on nothing but its letters."""
    return zlib.crc32(text.lower().encode()) % HELD_OUT_PART == 0


@dataclass(frozen=True)
class Fact:
    """One thing the model knows: how people ask for it, and the answers that count as right."""

    id: str
    answers: tuple[str, ...]
    asks: tuple[str, ...]
    """Hand-written questions, the canonical one first."""
    definitions: tuple[str, ...]
    """Questions that the definition templates make of the fact's terms."""
    patterned: tuple[str, ...]
    """Questions that the fact's own patterns make."""
    more: str
    why: str | None

    @property
    def questions(self) -> tuple[str, ...]:
        return self.asks + self.definitions + self.patterned


@dataclass(frozen=True)
class Turn:
    """A question together with every answer that counts as right."""

    question: str
    answers: tuple[str, ...]
    topic: str
    """The id of a fact, "outside/<kind>" or "followup"."""


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


@dataclass
class Corpus:
    """All written material, and the random draws from it."""

    held_out: bool = False
    """Draw only held-out wordings (True) or only the others (False)."""
    patterns: dict[str, list[str]] = field(default_factory=lambda: _load("patterns.toml"))
    wording: dict[str, Any] = field(default_factory=lambda: _load("wording.toml"))
    outside: dict[str, Any] = field(default_factory=lambda: _load("outside.toml"))

    @cached_property
    def facts(self) -> dict[str, Fact]:
        entries = [entry for name in FACT_FILES for entry in _load(name)["fact"]]
        written = {ask.lower() for entry in entries for ask in entry.get("ask", [])}
        return {entry["id"]: self._fact(entry, written) for entry in entries}

    def _fact(self, entry: dict[str, Any], written: set[str]) -> Fact:
        """`written`: hand-written questions in lower case; they win over what a template makes."""
        forms = [(term, "definition") for term in entry.get("term", [])]
        forms += [(term, "plural") for term in entry.get("plural", [])]
        made = [ask.format(t=term) for term, kind in forms for ask in self.wording[kind]]
        asks = [*made[:1], *entry.get("ask", [])]  # "What is <first term>?" comes first
        return Fact(
            id=entry["id"],
            answers=tuple(entry.get("answers") or [entry["answer"]]),
            asks=tuple(dict.fromkeys(asks)),
            patterned=tuple(q for q in self._patterned(entry["id"]) if q.lower() not in written),
            definitions=tuple(q for q in dict.fromkeys(made[1:]) if q.lower() not in written),
            more=entry["more"],
            why=entry.get("why"),
        )

    def _patterned(self, fact_id: str) -> list[str]:
        patterns = self.patterns.get(fact_id, [])
        return list(dict.fromkeys(q for pattern in patterns for q in expand(pattern)))

    def _pick(self, rng: random.Random, texts: list[str] | tuple[str, ...]) -> str | None:
        allowed = [text for text in texts if is_held_out(text) == self.held_out]
        return rng.choice(allowed) if allowed else None

    def questions(self, fact: Fact) -> list[str]:
        """The fact's wordings of this half of the corpus; its first few are never held out."""
        first = list(fact.asks[:N_CORE])
        rest = [q for q in fact.questions if q not in first and is_held_out(q) == self.held_out]
        return rest if self.held_out else first + rest

    @cached_property
    def _pools(self) -> dict[str, list[list[str]]]:
        """For each fact its hand-written, defining and patterned questions of this half."""
        table = {}
        for fact in self.facts.values():
            allowed = set(self.questions(fact))
            kinds = (fact.asks, fact.definitions, fact.patterned)
            pools = [[q for q in kind if q in allowed] for kind in kinds]
            table[fact.id] = [pool for pool in pools if pool]
        return table

    def fact_turn(self, rng: random.Random, fact: Fact) -> Turn | None:
        """A question for a fact: a core one, hand-written, a definition or from a pattern."""
        pools = self._pools[fact.id]
        if not pools:
            return None
        if not self.held_out and rng.random() < 0.12:
            return Turn(rng.choice(fact.asks[:N_CORE]), fact.answers, fact.id)
        weights = [3, 2, 2][: len(pools)]
        return Turn(rng.choice(rng.choices(pools, weights)[0]), fact.answers, fact.id)

    @cached_property
    def _words(self) -> dict[str, list[str]]:
        """Nouns, places, persons of this half; too short lists are shared by both halves."""
        words = {}
        for kind, items in self.outside["words"].items():
            part = [w for w in items if is_held_out(w) == self.held_out]
            words[kind] = part if len(items) > 50 else items
        return words

    def _noun(self, rng: random.Random) -> str:
        return nonsense(rng) if rng.random() < 0.12 else rng.choice(self._words["noun"])

    def _topic(self, rng: random.Random) -> str:
        """What a text shall be written about: anything, also what the model knows."""
        return rng.choice(self._words["inside"]) if rng.random() < 0.3 else self._noun(rng)

    def fill_outside(self, rng: random.Random, template: str) -> str:
        """Put random words in a template's braces, a new one for each."""
        makers: dict[str, Callable[[], str]] = {
            "{n}": lambda: self._noun(rng),
            "{b}": lambda: re.sub("^(an?|the) ", "", self._noun(rng)),
            "{v}": lambda: rng.choice(self._words["verb"]),
            "{t}": lambda: self._topic(rng),
            "{p}": lambda: rng.choice(self._words["place"]),
            "{w}": lambda: rng.choice(self._words["person"]),
            "{g}": lambda: rng.choice(self._words["proglang"]),
            "{l}": lambda: rng.choice(self._words["language"]),
            "{d}": lambda: str(rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4)))),
        }
        for mark, make in makers.items():
            while mark in template:
                template = template.replace(mark, make(), 1)
        return template

    def _outside_question(self, rng: random.Random, kind: str) -> str | None:
        fixed = self._pick(rng, self.outside["fixed"].get(kind, []))
        templates = self.outside["templates"].get(kind)
        if kind == "gibberish" and rng.random() < 0.5:
            return " ".join(nonsense(rng) for _ in range(rng.randint(1, 5)))
        if templates is None or (fixed and rng.random() < 0.25):
            return fixed
        if kind == "general" and rng.random() < 0.4:
            thing = rng.choice((self._noun(rng), self._noun(rng), *map(rng.choice, self._named)))
            return str(rng.choice(self.wording["definition"][:-2])).format(t=thing)
        return self.fill_outside(rng, rng.choice(templates))

    @cached_property
    def _named(self) -> tuple[list[str], list[str]]:
        return self._words["place"], self._words["person"]

    def outside_turn(self, rng: random.Random) -> Turn:
        """A question about anything else, with the answers that say what the model is."""
        while True:
            kind = rng.choices(list(OUTSIDE_WEIGHTS), list(OUTSIDE_WEIGHTS.values()))[0]
            question = self._outside_question(rng, kind)
            if question:
                return Turn(question, tuple(self.outside["answers"][kind]), f"outside/{kind}")

    def followup_turn(self, rng: random.Random, topic: str, last: str) -> Turn | None:
        """A short message that leans on the last answer; `topic` is what that was about."""
        entries = self.wording["followup"]
        entry = rng.choices(entries, [entry["weight"] for entry in entries])[0]
        question = self._pick(rng, entry["ask"])
        if question is None:
            return None
        fact, kind = self.facts.get(topic), entry["kind"]
        if kind == "again":
            return Turn(question, (last,), topic)
        if kind == "why" and fact and fact.why:
            return Turn(question, self.facts[fact.why].answers, topic)
        if kind == "more" and fact:
            return Turn(question, self.facts[fact.more].answers, fact.more)
        return Turn(question, (entry["reply"],), topic)

    def any_turn(self, rng: random.Random) -> Turn:
        """A question that needs no turn before it."""
        if rng.random() < 0.36:
            return self.outside_turn(rng)
        ids, weights = self._fact_weights
        while True:
            turn = self.fact_turn(rng, self.facts[rng.choices(ids, weights)[0]])
            if turn:
                return turn

    @cached_property
    def _fact_weights(self) -> tuple[list[str], list[float]]:
        """Facts with more wordings come a little more often."""
        return list(self.facts), [len(f.questions) ** 0.3 for f in self.facts.values()]

    def conversation(self, rng: random.Random, n_turns: int) -> list[Message]:
        """A whole conversation, ending with an answer; nearly half have a system prompt."""
        messages: list[Message] = []
        if rng.random() < 0.45:
            prompt = rng.choice(self.wording["system"]["prompts"])
            messages.append({"role": "system", "content": prompt})
        topic, last = "", ""
        for i in range(n_turns):
            turn = self.followup_turn(rng, topic, last) if i and rng.random() < 0.35 else None
            turn = turn or self.any_turn(rng)
            question = self.vary(rng, turn.question, first=i == 0)
            topic, last = turn.topic, rng.choice(turn.answers)
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": last},
            ]
        return messages

    def vary(self, rng: random.Random, question: str, first: bool = True) -> str:
        """Another spelling of a question: case, marks, an opening, typing errors."""
        for pair in self.wording["spelling"]:
            old, new = pair["words"]
            if old in question and rng.random() < 0.1:
                question = re.sub(rf"\b{re.escape(old)}\b", new, question)
        if rng.random() < 0.12:
            opening = rng.choice(self.wording["opening" if first else "linking"])
            question = opening + question[:1].lower() + question[1:]
        if rng.random() < 0.05:
            question += rng.choice(self.wording["closing"])
        if rng.random() < 0.3:
            question = question.lower()
        if rng.random() < 0.3:
            question = question.rstrip("?.!") or question
        if rng.random() < 0.08:
            question = question.rstrip("?.!") + rng.choice(("!", ".", "??", " ?", "...", "?"))
        return typo(rng, question) if rng.random() < 0.15 else question


def expand(pattern: str) -> list[str]:
    """Every text that a pattern with (a|b|c) alternatives stands for."""
    parts = [part.split("|") for part in re.split(r"[()]", pattern)]
    texts = (re.sub(" +", " ", "".join(choice)) for choice in itertools.product(*parts))
    return [re.sub(" ([?!.,])", r"\1", text).strip() for text in texts]


def typo(rng: random.Random, text: str) -> str:
    """One typing error: a letter lost, doubled, swapped, replaced or capital, or a word lost."""
    if len(text) < 6:
        return text
    i, kind = rng.randrange(len(text) - 1), rng.randrange(6)
    if kind == 5:
        words = text.split(" ")
        if len(words) > 4:
            del words[rng.randrange(len(words) - 1)]
        return " ".join(words)
    middle = (
        "", text[i] * 2, text[i + 1] + text[i], rng.choice("etaoinshrdlu"), text[i].upper(),
    )[kind]  # fmt: skip
    return text[:i] + middle + text[i + (2 if kind == 2 else 1) :]


def nonsense(rng: random.Random) -> str:
    """A word that does not exist, to learn what an unknown word looks like."""
    heads = [*"bcdfghjklmnprstvwz", "br", "cl", "dr", "fl", "gr", "pl", "sch", "st", "tr"]
    vowels, tails = "aeiou", ["", "", "n", "r", "l", "s", "x", "nt", "rk", "m", "t"]
    parts = [
        rng.choice(heads) + rng.choice(vowels) + rng.choice(tails) for _ in range(rng.randint(1, 3))
    ]
    return "".join(parts)
