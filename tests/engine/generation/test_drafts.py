"""Answers with guesses say what they say without any, wherever a guess is wrong."""

from collections.abc import Sequence

import pytest

from app.core.paths import demo_model
from engine import Finished, Model, SamplingParams, load_model
from engine.decoding.drafting.control import DraftControl
from engine.generation.drafts import Drafts
from engine.generation.scheduler import Scheduler
from engine.generation.sequence import TokenSequence
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
from tests.helpers.prophet import Prophet, always
from tests.helpers.reading import read
from tests.helpers.tiers import paired


def drafts(answers: Sequence[Sequence[int]], wrong_at: int | None, most: int = 7) -> Drafts:
    """Return guesses that are right but for one place."""
    return Drafts(most, [Prophet(answers, lambda _: wrong_at)], always())


@pytest.mark.parametrize("wrong_at", [None, *range(7)])
@pytest.mark.parametrize("kind", ["whole", "windowed", "chunked"])
def test_a_wrong_guess_at_any_place_changes_nothing(kind: str, wrong_at: int | None) -> None:
    runtime, prompt = made(kind, n_ctx=900), prompt_of(240)
    wanted = params(50, banned_strings=(), frequency_penalty=0.4)
    expected = alone(runtime, prompt, wanted)
    scheduler = Scheduler(
        runtime, drafts=drafts([[*prompt, *ids_of(expected)]], wrong_at)
    )  # behind 256 tokens, pages and windows change
    events = read(scheduler, submitted(scheduler, runtime, prompt, wanted))
    assert told(events) == expected
    usage = last_of(events).usage
    n_right = 7 if wrong_at is None else wrong_at
    assert usage.n_drafted > 0
    assert usage.n_accepted >= usage.n_drafted * n_right // 7 - 7
    n_single = sum(batch.is_of_singles for batch in runtime.batches)
    assert n_single <= 50 // (1 + n_right) + 7, "passes are saved"


@pytest.mark.parametrize("wrong_at", [None, 2])
def test_what_guesses_save_is_compared_with_passes_without(
    wrong_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes without guesses are said to take so long that those with some take next to nothing."""
    n_passes, note = 0, Drafts.note_seconds

    def counted(own: Drafts, requests: Sequence[TokenSequence], seconds: float) -> None:
        nonlocal n_passes
        n_passes += 1
        note(own, requests, seconds)

    monkeypatch.setattr(Drafts, "note_seconds", counted)
    monkeypatch.setattr(DraftControl, "measured_s", lambda *_: 1e6)
    runtime, prompt = made("whole", n_ctx=900), prompt_of(40)
    expected = alone(runtime, prompt, params(50))
    scheduler = Scheduler(runtime, drafts=drafts([[*prompt, *ids_of(expected)]], wrong_at))
    last = last_of(read(scheduler, submitted(scheduler, runtime, prompt, params(50))))
    assert last.timings.saved_s / 1e6 == pytest.approx(n_passes + last.usage.n_accepted, abs=0.01)
    without = last.timings.decode_s + last.timings.saved_s
    assert last.timings.draft_gain == pytest.approx(without / last.timings.decode_s)


MODELS = ("llama-gqa-q4_k_m", "mixtral-q4_k_m", "deepseek3-mla-q4_k_m", "gemma3-q4_0")
"""Dense, experts, latent attention, windows."""

SPLITS = ((1,), (1, 1), (3, 1, 2))


def answers(model: Model, prompts: Sequence[Sequence[int]], **wished: object) -> list[list[int]]:
    """Return what is said to several prompts that are computed together."""
    streams = [
        model.generate(
            prompt,
            SamplingParams(seed=n, temperature=1.0, max_tokens=24, ignore_eos=True, **wished),
        )
        for n, prompt in enumerate(prompts)
    ]
    found: list[list[int]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for n in list(left):
            event = next(streams[n], None)
            found[n] += getattr(event, "ids", ())
            if event is None:
                left.remove(n)
    return found


def knowing(prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Drafts:
    """Return guesses that are wrong at another place each time, or not at all."""
    known = [[*p, *ids] for p, ids in zip(prompts, expected, strict=True)]
    return Drafts(7, [Prophet(known, lambda n: n % 9)], always())


@pytest.mark.parametrize(("name", "split"), paired(MODELS, SPLITS))
def test_models_have_the_bits_that_they_have_without(name: str, split: tuple[int, ...]) -> None:
    """Alone and four at once, and behind a change of the split that keeps the order of sums."""
    devices, path = ["cpu"] * len(split), golden_path(f"{name}.gguf")
    prompts = [[3 + (7 * n + i) % 190 for i in range(250 + n)] for n in range(4)]
    with load_model(path, devices, split, n_ctx=512, parallel=4, draft="off") as model:
        expected = answers(model, prompts)
        model.scheduler.drafts = knowing(prompts, expected)
        assert answers(model, prompts) == expected
        assert answers(model, prompts[:1]) == expected[:1]
        if len(split) > 1:
            model.resplit(split[::-1])
            model.scheduler.drafts = Drafts()
            turned = answers(model, prompts[:1])
            model.scheduler.drafts = knowing(prompts[:1], turned)
            assert answers(model, prompts[:1]) == turned


@pytest.mark.parametrize(
    "wished",
    [
        {"grammar": r'root ::= ("[" [0-9]+ "]")+'},
        {"banned_strings": (" the", " a")},
        {"stop": (" and",), "dry_multiplier": 0.8, "presence_penalty": 0.5},
    ],
    ids=["grammar", "banned", "stop and penalties"],
)
def test_what_restricts_an_answer_holds_for_guesses(wished: dict[str, object]) -> None:
    with load_model(demo_model(), n_ctx=512, parallel=2, draft="off") as model:
        prompts = [model.tokenize(text) for text in ("Once upon a time", "A little dog")]
        expected = answers(model, prompts, **wished)
        model.scheduler.drafts = knowing(prompts, expected)
        assert answers(model, prompts, **wished) == expected


def test_text_that_repeats_takes_fewer_passes_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guesses are those of the text itself, and their number follows what they bring.

    A row of a pass takes what is expected of it, however busy the machine is.
    """
    monkeypatch.setattr(DraftControl, "note_pass", lambda *_: None)
    with load_model(demo_model(), n_ctx=512) as model:
        prompt = "The cat saw the dog. The dog ran home. " * 6
        greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        (*_, last) = model.generate(prompt, greedy)
        assert isinstance(last, Finished)
        assert last.usage.completion_tokens == 60
        assert 0 < last.usage.n_accepted <= last.usage.n_drafted
