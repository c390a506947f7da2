"""Guesses for models with recurrent states: right and wrong ones leave the states of none."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Model, load_model
from engine.decoding.drafting.control import DraftControl, Proposal
from engine.decoding.sampling.sampler import Logits
from engine.generation.cache_manager import KVCacheManager
from engine.generation.drafts import Drafts
from engine.generation.scheduler import Scheduler
from engine.model.forward.batch import Batch, Piece
from tests.engine.generation.test_drafts import answers, knowing
from tests.engine.generation.test_scheduler import (
    alone,
    ids_of,
    last_of,
    made,
    params,
    prompt_of,
    submitted,
    told,
)
from tests.helpers.golden import golden_path
from tests.helpers.model_draft import ModelDraft
from tests.helpers.paged_toy import ToySource
from tests.helpers.prophet import Prophet, always
from tests.helpers.reading import read
from tests.helpers.tiers import paired, slow
from tests.helpers.tiny_gguf import tiny_gguf

N_SLOTS = 8
"""Number of places of the toy's states: those of a sequence, and of 7 guesses."""


@pytest.mark.parametrize("wrong_at", [None, *range(7)])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "all"])
def test_a_wrong_guess_at_any_place_changes_nothing(kind: str, wrong_at: int | None) -> None:
    runtime = made(kind, n_slots=N_SLOTS, n_ctx=900)
    prompt, wanted = prompt_of(240), params(50, banned_strings=(), frequency_penalty=0.4)
    expected = alone(runtime, prompt, wanted)
    known = [[*prompt, *ids_of(expected)]]
    drafts = Drafts(7, [Prophet(known, lambda _: wrong_at)], always())
    scheduler = Scheduler(runtime, drafts=drafts)
    events = read(scheduler, submitted(scheduler, runtime, prompt, wanted))
    assert told(events) == expected
    usage = last_of(events).usage
    n_right = 7 if wrong_at is None else wrong_at
    assert usage.n_drafted > 0
    assert usage.n_accepted >= usage.n_drafted * n_right // 7 - 7
    n_single = sum(batch.is_of_singles for batch in runtime.batches)
    assert n_single <= 50 // (1 + n_right) + 7, "passes are saved"


def test_guesses_share_the_places_that_no_sequence_needs() -> None:
    runtime = made("hybrid", n_slots=N_SLOTS, n_ctx=900)
    prompts = [prompt_of(40, seed) for seed in range(5)]
    expected = [alone(runtime, p, params(60, i)) for i, p in enumerate(prompts)]
    known = [[*p, *ids_of(e)] for p, e in zip(prompts, expected, strict=True)]
    drafts = Drafts(15, [Prophet(known, lambda n: n % 9)], always())
    scheduler = Scheduler(runtime, drafts=drafts)
    asked = [submitted(scheduler, runtime, p, params(60, i)) for i, p in enumerate(prompts)]
    assert [told(read(scheduler, one)) for one in asked] == expected
    checking = set[int]()
    for batch in runtime.batches:
        slots = {piece.state_slot for piece in batch.pieces}
        assert len(slots) == len(batch.pieces) <= N_SLOTS
        n_sequence = sum(piece.read_slot == piece.state_slot for piece in batch.pieces)
        if n_sequence < len(slots):
            checking.add(n_sequence)
    assert {1, 2} <= checking <= {1, 2, 3, 4}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_device_that_samples_ahead_comes_to_a_halt_before_guesses(kind: str, ahead: int) -> None:
    """Its states cannot go back, so what it has computed already is taken before a check."""
    runtime, prompt, wanted = made(kind, n_slots=N_SLOTS, n_ctx=900), prompt_of(240), params(50)
    expected = alone(runtime, prompt, wanted)
    known = [[*prompt, *ids_of(expected)]]
    runtime.token_source = source = ToySource(runtime, ahead)
    drafts = Drafts(7, [Prophet(known, lambda k: k % 8)], SometimesControl())
    runtime.batches.clear()
    scheduler = Scheduler(runtime, drafts=drafts)
    events = read(scheduler, submitted(scheduler, runtime, prompt, wanted))
    assert told(events) == expected
    usage = last_of(events).usage
    assert usage.n_drafted > usage.n_accepted > 0
    assert source.n_delivered > 5
    n_rows = sum(batch.n_rows for batch in runtime.batches)
    assert n_rows <= 240 + 50 + usage.n_drafted + ahead, "nothing is computed again"


class SometimesControl(DraftControl):
    """A control that has three guesses checked some times, and some times not."""

    n_asked = 0

    def choose(self, proposals: Sequence[Proposal]) -> tuple[Proposal, int] | None:
        self.n_asked += 1
        useful = [proposal for proposal in proposals if proposal.most >= 3]
        return (useful[0], 3) if useful and self.n_asked % 10 < 5 else None


QUICK = ("qwen35-q4_k_m", "mamba-q5_0", "falcon-h1-q4_k_m", "kimi-linear-q4_k_m")
"""Delta nets with attention, Mamba 1, Mamba 2 beside attention, a decay for each channel."""

OTHERS = (
    "qwen35moe-q4_k_m", "qwen3next-q4_k_m", "mamba2-q4_k_m", "jamba-q4_k_m", "lfm2-q4_k_m",
    "lfm2moe-q4_k_m", "granitehybrid-q4_k_m", "nemotron_h-q4_k_m", "nemotron_h_moe-q4_k_m",
)  # fmt: skip

SPLITS = ((1,), (1, 1), (3, 1, 2))

every_model = pytest.mark.parametrize(
    ("name", "split"),
    [*paired(QUICK, SPLITS), *slow(*((name, split) for name in OTHERS for split in SPLITS))],
)


def opened(name: str, split: Sequence[int], **wished: object) -> Model:
    path, devices = golden_path(f"{name}.gguf"), ["cpu"] * len(split)
    return load_model(path, devices, tuple(split), n_ctx=512, **wished)


def sizes_of_passes(model: Model) -> list[int]:
    """Return a list of the number of rows of each pass from now on."""
    runner, found = model.runtime.runner, list[int]()
    compute = runner.sample

    def sample(ids: Sequence[int], *args: Any) -> Any:
        found.append(len(ids))
        return compute(ids, *args)

    runner.sample = sample  # type: ignore[method-assign]
    return found


def states_behind(model: Model, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return the recurrent states behind tokens, which were kept at the end of an answer."""
    kept = model.scheduler.cache.checkpoints.state(ids)
    return [tensor for layer in kept for tensor in layer.values()]


@every_model
def test_models_have_the_bits_that_they_have_without(name: str, split: tuple[int, ...]) -> None:
    """Four at once and alone, what is said and the states behind it; and behind a re-split."""
    prompts = [[3 + (7 * n + i) % 190 for i in range(30 + n)] for n in range(4)]
    with opened(name, split, parallel=4) as model:
        model.scheduler.drafts = Drafts()
        expected = answers(model, prompts)
        ends = [[*p, *ids][:-1] for p, ids in zip(prompts, expected, strict=True)]
        states = [states_behind(model, ids) for ids in ends]
        sizes = sizes_of_passes(model)
        for n, n_rows in ((4, 16), (1, 8)):
            model.scheduler.forget()
            model.scheduler.drafts = knowing(prompts, expected)
            assert answers(model, prompts[:n]) == expected[:n]
            assert sizes.count(n_rows) > 2, "guesses are checked by replays, too"
            for ids, wanted in zip(ends[:n], states, strict=False):
                assert all(map(torch.equal, states_behind(model, ids), wanted))
        if len(split) > 1:
            model.resplit(split[::-1])
            model.scheduler.forget()
            model.scheduler.drafts = Drafts()
            turned = answers(model, prompts[:1])
            model.scheduler.forget()
            model.scheduler.drafts = knowing(prompts[:1], turned)
            assert answers(model, prompts[:1]) == turned


@every_model
def test_a_checked_row_has_the_logits_that_its_token_has_alone(
    name: str, split: tuple[int, ...]
) -> None:
    """Passes of chains are recorded, then replayed with other chains in other places."""
    ids = [3 + 7 * i % 190 for i in range(40)]
    n = 20
    with opened(name, split, draft_max=3, parallel=2) as model:
        runner = model.runtime.runner
        assert runner.n_slots == 8
        tables = tuple((0, 1) for _ in runner.groups)

        def run(tokens: Sequence[int], *pieces: Piece, first: int = 0) -> Logits:
            return runner.forward(tokens, Batch(pieces, first))

        runner.clear_slot(0)
        run(ids[:n], Piece(0, n, tables), first=n)
        begun, _ = runner.save_slot(0)
        plain = {at: run(ids[at : at + 1], Piece(at, 1, tables))[0] for at in range(n, n + 11)}
        runner.load_slot(0, begun)
        slot, at = 0, n
        for n_right, spare in enumerate(((5, 2, 7), (1, 6, 4), (3, 0, 5), (2, 4, 1)), 1):
            places = [slot, slot, *spare]
            states = enumerate(pairwise(places))
            pieces = [Piece(at + i, 1, tables, goal, source=source) for i, (source, goal) in states]
            found = run([*ids[at : at + n_right], *[9] * (4 - n_right)], *pieces)
            for i in range(n_right):
                assert np.array_equal(found[i], plain[at + i])
            slot, at = places[n_right], at + n_right
        (one,) = run(ids[at : at + 1], Piece(at, 1, tables, slot))
        assert np.array_equal(one, plain[at])
        assert all(4 in rank.recordings for rank in runner.ranks)


@pytest.mark.parametrize(
    "wished",
    [{"grammar": r'root ::= ("[" [0-9]+ "]")+'}, {"dry_multiplier": 0.8, "presence_penalty": 0.5}],
    ids=["grammar", "penalties"],
)
def test_what_restricts_an_answer_holds_for_guesses(
    tmp_path: Path, wished: dict[str, object]
) -> None:
    words = ModelDraft.read(tiny_gguf(tmp_path / "words.gguf", n_vocab=320)).meta
    found = {key: value for key, value in words.items() if key.startswith("tokenizer.")}
    path = ModelDraft.read(golden_path("qwen35-q4_k_m.gguf")).changed(found)
    with load_model(path.write(tmp_path / "m.gguf"), n_ctx=512, parallel=2) as model:
        model.scheduler.drafts = Drafts()
        prompts = [model.tokenize(text) for text in ("hello world", "the model")]
        expected = answers(model, prompts, **wished)
        model.scheduler.forget()
        model.scheduler.drafts, sizes = knowing(prompts, expected), sizes_of_passes(model)
        assert answers(model, prompts, **wished) == expected
        assert {4, 8} & set(sizes), "guesses are checked"


def test_there_are_as_many_places_as_the_runtime_has_states() -> None:
    """Behind a change of the split, too, where another one has memory for fewer."""
    manager = KVCacheManager(made("hybrid", n_slots=8, n_ctx=900))
    one = manager.allocate(prompt_of(40))
    assert [manager.max_sequences, manager.max_drafts(1), manager.max_drafts(2)] == [8, 7, 3]
    manager.free(one)
    manager.move(made("hybrid", n_slots=4, n_ctx=900))
    one = manager.allocate(prompt_of(40))
    assert [manager.max_sequences, manager.max_drafts(1), manager.max_drafts(2)] == [4, 3, 1]
    manager.reserve_draft_slots(one, 3)
    assert sorted([one.state_slot, *one.draft_slots]) == [0, 1, 2, 3]
    assert manager.max_drafts(1) == 0
