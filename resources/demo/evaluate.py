"""How well the finished file answers: seen and held-out wordings, other subjects, longer chats.

An answer counts as right when it is, letter for letter, one of the answers written for that
question. For a question from outside, any of the written "that is not my subject" answers counts,
since all of them say what the model is.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from resources.demo import gguf_file
from resources.demo.corpus import Corpus, Message, Turn
from resources.demo.network import Llama
from resources.demo.text import Encoder

log = logging.getLogger("demo.evaluate")
MAX_NEW = 150
CANONICAL = (
    "What is tensor parallelism?",
    "What is Tandem?",
    "Hello",
    "Who are you?",
    "What is a GPU?",
    "What is quantisation?",
    "What is a GGUF file?",
    "What is the capital of France?",
    "Write a Python function",
    "How do I split a model over two GPUs?",
    "Thanks!",
    "What is the KV cache?",
)

Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A conversation up to a question, and what may follow."""

    messages: list[Message]
    answers: frozenset[str]
    topic: str


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def default_sampling(rng: torch.Generator) -> Pick:
    """The app's defaults: top-k 40, top-p 0.95, min-p 0.05, then temperature 0.8."""

    def pick(logits: Tensor) -> Tensor:
        top, ids = logits.topk(40)
        p = top.softmax(-1)
        keep = (p.cumsum(-1) - p < 0.95) & (p >= 0.05 * p[:, :1])
        p = (top.masked_fill(~keep, -torch.inf) / 0.8).softmax(-1)
        return ids.gather(1, torch.multinomial(p, 1, generator=rng))[:, 0]

    return pick


class Speaker:
    """Generates answers for many prompts at once."""

    def __init__(self, path: Path) -> None:
        self.model, tokenizer = gguf_file.read(path)
        self.encoder = Encoder(tokenizer)

    def answers(self, chats: list[list[Message]], pick: Pick, batch: int = 64) -> list[str]:
        """One answer for each conversation; prompts of equal length run together."""
        prompts = [self.encoder.prompt(chat) for chat in chats]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, str] = {}
        while order:
            length = len(prompts[order[0]])
            group = [i for i in order[:batch] if len(prompts[i]) == length]
            order = order[len(group) :]
            found.update(zip(group, self._generate([prompts[i] for i in group], pick), strict=True))
        return [found[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], pick: Pick) -> list[str]:
        model: Llama = self.model
        hidden, cache = model.hidden(torch.tensor(prompts))
        rows: list[Tensor] = []
        done = torch.zeros(len(prompts), dtype=torch.bool)
        for _ in range(min(MAX_NEW, model.hp.n_ctx - len(prompts[0]))):
            ids = pick(model.head(hidden[:, -1]))
            rows.append(ids)
            done |= ids == self.encoder.end
            if done.all():
                break
            hidden, cache = model.hidden(ids[:, None], cache)
        return [self._text(column.tolist()) for column in torch.stack(rows, 1)]

    def _text(self, ids: list[int]) -> str:
        end = self.encoder.end
        cut = ids[: ids.index(end)] if end in ids else ids
        return str(self.encoder.tokenizer.decode(cut))


def outside_answers(corpus: Corpus) -> frozenset[str]:
    return frozenset(a for answers in corpus.outside["answers"].values() for a in answers)


def as_case(turn: Turn, corpus: Corpus, before: list[Message] | None = None) -> Case:
    right = frozenset(turn.answers)
    if turn.topic.startswith("outside/"):
        right |= outside_answers(corpus)
    return Case([*(before or []), {"role": "user", "content": turn.question}], right, turn.topic)


def written(corpus: Corpus) -> list[Case]:
    """Every hand-written question of this half of the corpus, as it stands."""
    turns = [
        Turn(q, fact.answers, fact.id)
        for fact in corpus.facts.values()
        for q in corpus.questions(fact)
        if q in fact.asks
    ]
    return [as_case(turn, corpus) for turn in turns]


def from_templates(corpus: Corpus, rng: random.Random, n: int) -> list[Case]:
    """Questions that templates and patterns make."""
    turns = [
        Turn(q, fact.answers, fact.id)
        for fact in corpus.facts.values()
        for q in corpus.questions(fact)
        if q not in fact.asks
    ]
    return [as_case(turn, corpus) for turn in rng.sample(turns, min(n, len(turns)))]


def outside(corpus: Corpus, rng: random.Random, n: int) -> list[Case]:
    return [as_case(corpus.outside_turn(rng), corpus) for _ in range(n)]


def in_chats(corpus: Corpus, rng: random.Random, n: int) -> list[Case]:
    """Questions after one to six turns, varied in spelling, with and without a system prompt."""
    cases: list[Case] = []
    while len(cases) < n:
        before = corpus.conversation(rng, rng.randint(1, 6))
        turn = corpus.any_turn(rng)
        asked = Turn(corpus.vary(rng, turn.question, first=False), turn.answers, turn.topic)
        cases.append(as_case(asked, corpus, before))
    return cases


def follow_ups(corpus: Corpus, rng: random.Random, n: int) -> list[Case]:
    """Short messages such as "Tell me more." after a fact."""
    cases: list[Case] = []
    while len(cases) < n:
        fact = rng.choice(list(corpus.facts.values()))
        last = rng.choice(fact.answers)
        before = [{"role": "user", "content": fact.asks[0]}, {"role": "assistant", "content": last}]
        turn = corpus.followup_turn(rng, fact.id, last)
        if turn:
            cases.append(as_case(turn, corpus, before))
    return cases


def case_sets(n: int, seed: int) -> dict[str, list[Case]]:
    """The named sets of the report."""
    seen, held, rng = Corpus(), Corpus(held_out=True), random.Random(seed + 1000)
    return {
        "seen, written": written(seen),
        "seen, templates": from_templates(seen, rng, n),
        "seen, outside": outside(seen, rng, n),
        "seen, in chats": in_chats(seen, rng, n),
        "seen, follow-ups": follow_ups(seen, rng, n),
        "held out, written": written(held),
        "held out, templates": from_templates(held, rng, n),
        "held out, outside": outside(held, rng, n),
        "held out, follow-ups": follow_ups(held, rng, n),
    }


def known_answers(corpus: Corpus) -> frozenset[str]:
    """Every written answer: what is not among them is a text the model made up."""
    facts = [a for fact in corpus.facts.values() for a in fact.answers]
    replies = [e["reply"] for e in corpus.wording["followup"] if "reply" in e]
    return frozenset([*facts, *replies]) | outside_answers(corpus)


def evaluate(path: Path, seed: int, n: int = 400, show: int = 12) -> None:
    """Log the answers to the canonical questions, then the scores of every set.

    `show` is the number of wrong answers that are printed for each set.
    """
    speaker, whole = Speaker(path), known_answers(Corpus())
    asked = [[{"role": "user", "content": question}] for question in CANONICAL]
    for question, answer in zip(CANONICAL, speaker.answers(asked, greedy), strict=True):
        log.info("%-40s %s", question, answer)
    for name, cases in case_sets(n, seed).items():
        pick = default_sampling(torch.Generator().manual_seed(seed))
        answers = speaker.answers([case.messages for case in cases], greedy)
        report(f"{name}, greedy", cases, answers, whole)
        for case, answer in wrong_ones(cases, answers)[:show]:
            question = case.messages[-1]["content"]
            log.info("    [%s] %s -> %s", case.topic, question, answer[:100])
        report(f"{name}, sampled", cases, speaker.answers([c.messages for c in cases], pick), whole)


def wrong_ones(cases: list[Case], answers: list[str]) -> list[tuple[Case, str]]:
    return [(c, a) for c, a in zip(cases, answers, strict=True) if a not in c.answers]


def report(name: str, cases: list[Case], answers: list[str], whole: frozenset[str]) -> None:
    """Log the share of right answers, and that of texts that somebody wrote."""
    right = 1 - len(wrong_ones(cases, answers)) / len(cases)
    intact = sum(answer in whole for answer in answers) / len(cases)
    log.info(
        "%-28s n=%4d right %5.1f%% intact %5.1f%%", name, len(cases), 100 * right, 100 * intact
    )
