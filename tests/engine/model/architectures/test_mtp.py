"""A model's MTP block guesses what the formulas say, and costs nothing where it is not wanted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import EngineError, Model, load_model
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.batch import Batch, Piece
from engine.planning.evaluation.workload import ModelWorkload
from engine.planning.plan import make_plan
from engine.planning.planner import Planner
from tests.helpers.mtp_families import FAMILIES, PlainFamilyMTP, family_gguf
from tests.helpers.mtp_models import N_EMBD, OWN, PlainMTP, mtp_gguf
from tests.helpers.tiers import paired

ARCHITECTURES = "glm4moe", "qwen35", "step35"
"""Reading raw and normed hidden states, and with a window."""

SPLITS = ((1,), (1, 1), (3, 1, 2))

IDS = np.random.default_rng(5).integers(3, 300, 44).tolist()

CHUNKS = 7, 1, 13
"""Pieces in which the beginning of the prompt is computed."""


def opened(path: Path, split: Sequence[float] = (1,), draft: str = "mtp", **more: object) -> Model:
    wanted = {"n_ctx": 64, "kv_type": "f32"} | more
    return load_model(path, ["cpu"] * len(split), split, draft=draft, **wanted)


def prefilled(model: Model) -> int:
    """Compute the beginning of the prompt in pieces; return how much that is."""
    at = 0
    for n in CHUNKS:
        model.runtime.runner.forward(IDS[at : at + n], Batch.of_one(at, n, n))
        at += n
    return at


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("own", [(), OWN], ids=["trunk's", "own"])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_guesses_are_those_of_the_formulas(
    request: pytest.FixtureRequest, tmp_path: Path, arch: str, split: tuple[int, ...],
    own: tuple[str, ...], mode: str,
) -> None:  # fmt: skip
    """With kernels and without, as are the two modes."""
    if mode == "layer":
        request.getfixturevalue("kernels")
    path = mtp_gguf(tmp_path / "m.gguf", arch, own=own)
    plain = PlainMTP(path)
    guesses, logits = plain.guesses(IDS), plain.trunk(IDS)
    with opened(path, split, split_mode=mode) as model:
        runner = model.runtime.runner
        for at in range(prefilled(model), len(IDS)):
            token, batch = IDS[at : at + 1], Batch.of_one(at, 1, 0)
            np.testing.assert_allclose(runner.draft(token, batch)[0], guesses[at - 1], atol=2e-5)
            np.testing.assert_allclose(runner.forward(token, batch)[0], logits[at], atol=2e-5)


@pytest.mark.parametrize(("family", "split"), paired([*FAMILIES], SPLITS))
def test_guesses_of_further_families_are_those_of_the_formulas(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, split: tuple[int, ...]
) -> None:
    """With kernels and without; a chain of them, too."""
    path = family_gguf(tmp_path / "m.gguf", family)
    plain = PlainFamilyMTP(path)
    guesses, logits = plain.guesses(IDS), plain.trunk(IDS)
    if len(split) > 1:
        request.getfixturevalue("kernels")
    with opened(path, split) as model:
        runner = model.runtime.runner
        for at in range(prefilled(model), len(IDS)):
            token, found = IDS[at], list[int]()
            for n in range(3):
                guess = runner.draft([token], Batch.of_one(at + n, 1, 0), n)[0]
                if not n:
                    np.testing.assert_allclose(guess, guesses[at - 1], atol=2e-5)
                token = int(guess.argmax())
                found.append(token)
            assert found == plain.chain(IDS[: at + 1], 3)
            token, batch = IDS[at : at + 1], Batch.of_one(at, 1, 0)
            np.testing.assert_allclose(runner.forward(token, batch)[0], logits[at], atol=2e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_recorded_guesses_have_the_bits_of_computed_ones(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0")
    with opened(path, split, kv_type="f16") as model:
        runner, at = model.runtime.runner, prefilled(model)
        for token in IDS[:2]:
            runner.recover()  # drops what is recorded
            found = [runner.draft([token], Batch.of_one(at, 1, 0)) for _ in range(4)]
            assert all(rank.draft_recordings for rank in runner.ranks)
            assert all(np.array_equal(logits, found[0]) for logits in found)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_guesses_go_on_from_guesses(tmp_path: Path, arch: str) -> None:
    """Wrong ones leave nothing behind: what is computed then takes their place."""
    path = mtp_gguf(tmp_path / "m.gguf", arch)
    plain = PlainMTP(path)
    with opened(path, (1, 1)) as model:
        runner = model.runtime.runner
        for at in range(prefilled(model), len(IDS)):
            token, found = IDS[at], list[int]()
            for n in range(3):
                logits = runner.draft([token], Batch.of_one(at + n, 1, 0), n)
                token = int(logits[0].argmax())
                found.append(token)
            assert found == plain.chain(IDS[: at + 1], 3)
            runner.forward(IDS[at : at + 1], Batch.of_one(at, 1, 0))


GAPS = 1, 4, 4, 4, 20, 70, 2
"""Numbers of tokens between two guesses: few are read with the next one, many before."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_tokens_are_read_when_something_is_guessed_behind_them(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Of two sequences, one of which is behind, also where wrong guesses were computed."""
    path = mtp_gguf(tmp_path / "m.gguf", arch)
    plain, rng = PlainMTP(path), np.random.default_rng(6)
    texts = [rng.integers(3, 300, 30 + sum(GAPS)).tolist() for _ in range(2)]
    expected = [plain.guesses(ids) for ids in texts]
    with opened(path, split, n_ctx=256, parallel=2) as model:
        runner, wrong = model.runtime.runner, 7
        tables = [tuple((seat,) for _ in runner.groups) for seat in range(2)]
        lengths = [13, 8]
        for seat, (ids, n) in enumerate(zip(texts, lengths, strict=True)):
            runner.forward(ids[:n], Batch((Piece(0, n, tables[seat], seat, seat),), n))
        for gap in GAPS:
            for _ in range(gap):
                rows = [(s, lengths[s] + i) for s in range(2) for i in range(2)]
                pieces = tuple(Piece(at, 1, tables[s], s, s) for s, at in rows)
                tokens = [texts[s][at] if at == lengths[s] else wrong for s, at in rows]
                runner.forward(tokens, Batch(pieces, 0))
                lengths = [n + 1 for n in lengths]
            tokens = [ids[n] for ids, n in zip(texts, lengths, strict=True)]
            pieces = tuple(Piece(n, 1, tables[s], s, s) for s, n in enumerate(lengths))
            for found, guesses, n in zip(
                runner.draft(tokens, Batch(pieces, 0)), expected, lengths, strict=True
            ):
                np.testing.assert_allclose(found, guesses[n - 1], atol=2e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_logits_have_the_bits_that_they_have_without(
    tmp_path: Path, arch: str, split: tuple[int, ...], mode: str
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0")

    def found(draft: str) -> list[np.ndarray]:
        with opened(path, split, draft, split_mode=mode) as model:
            runner = model.runtime.runner
            return [
                runner.forward(IDS[at : at + 1], Batch.of_one(at, 1, 0))
                for at in range(prefilled(model), len(IDS))
            ]

    assert np.array_equal(found("mtp"), found("off"))


@pytest.mark.parametrize("split", SPLITS)
def test_its_memory_is_planned_and_only_taken_if_wanted(
    tmp_path: Path, split: tuple[int, ...]
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", own=OWN)
    taken = {}
    for draft in ("off", "mtp"):
        with opened(path, split, draft) as model:
            memory = model.memory()
        for rank in memory:
            assert (rank.measured.weights, rank.measured.kv) == (
                rank.predicted.weights, rank.predicted.kv,
            )  # fmt: skip
        taken[draft] = sum(rank.measured.weights + rank.measured.kv for rank in memory)
    assert taken["mtp"] > 1.4 * taken["off"], "one block of three, and a head of its own"


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("split", SPLITS)
def test_plans_at_a_drag_are_those_of_a_load(
    tmp_path: Path, split: tuple[int, ...], mode: str
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", own=OWN)
    planner, work = Planner(path), {}
    for draft in ("mtp", "off"):
        params = LoadParams(
            str(path), ("cpu",) * len(split), split, mode, n_ctx=64, draft=draft,
        )  # fmt: skip
        with GGUFFile.open(path) as file:
            assert planner.plan(params) == make_plan(declare(file, params), params, None)
        work[draft] = planner.evaluate(params).load
    planner.close()
    assert parts(work["mtp"]) == parts(work["off"]), "a token goes through the trunk alone"
    endings = {draft: [block.is_ending for block in work[draft].blocks] for draft in work}
    assert not any(endings["mtp"]), "the block reads all rows of a prompt"
    assert any(endings["off"])


def parts(load: ModelWorkload) -> Counter[str]:
    """Return how often each part of a block occurs, whether rows may be left out or not."""
    found = Counter[str]()
    for block in load.blocks:
        found[repr(replace(block, count=1, is_ending=False))] += block.count
    return found


def test_a_file_without_a_block_is_named(tmp_path: Path) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", n_mtp=0)
    with pytest.raises(EngineError, match=r"m\.gguf has no MTP block"):
        opened(path)


def test_a_block_of_an_architecture_that_is_not_known_to_have_one_is_refused(
    tmp_path: Path,
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", "qwen3")
    with pytest.raises(EngineError, match="MTP block of qwen3 models is not supported yet"):
        opened(path)
    opened(path, draft="off").close()


N_GUESSED = 256


@pytest.mark.parametrize("own", [(), OWN], ids=["trunk's", "own"])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_guesses_from_some_tokens_are_those_of_all_without_the_rest(
    request: pytest.FixtureRequest, tmp_path: Path, arch: str, split: tuple[int, ...],
    own: tuple[str, ...],
) -> None:  # fmt: skip
    """With kernels on several ranks; memory is as planned, also behind a change of the split."""
    if len(split) > 1:
        request.getfixturevalue("kernels")
    path = mtp_gguf(tmp_path / "m.gguf", arch, own=own)
    guesses = PlainMTP(path).guesses(IDS)
    with opened(path, split, draft_vocab=N_GUESSED) as model:
        for _ in range(2):
            runner = model.runtime.runner
            at = prefilled(model)
            for n in range(at, at + 3):
                token, batch = IDS[n : n + 1], Batch.of_one(n, 1, 0)
                found = runner.draft(token, batch)[0]
                np.testing.assert_allclose(found, guesses[n - 1][:N_GUESSED], atol=2e-5)
                assert runner.forward(token, batch).shape == (1, 320)
            for rank in model.memory():
                assert rank.measured.weights == rank.predicted.weights
            model.resplit(split[::-1])


@pytest.mark.parametrize("split", SPLITS)
def test_plans_count_the_rows_that_are_held_once_more(
    tmp_path: Path, split: tuple[int, ...]
) -> None:
    planner, held = Planner(mtp_gguf(tmp_path / "m.gguf")), {}
    for n in (0, N_GUESSED, 320):
        params = LoadParams(
            str(tmp_path / "m.gguf"), ("cpu",) * len(split), split, draft="mtp", draft_vocab=n,
            n_ctx=64,
        )  # fmt: skip
        with GGUFFile.open(params.path) as file:
            expected = make_plan(declare(file, params), params, None)
        assert planner.plan(params) == expected
        held[n] = sum(device.memory.weights for device in expected.devices)
    planner.close()
    assert held[N_GUESSED] == held[0] + N_GUESSED * N_EMBD * 4
    assert held[320] == held[0], "that are all"


def test_the_rows_are_those_of_the_file(tmp_path: Path) -> None:
    """Nothing is quantised anew: the numbers of guesses stay what they are."""
    path = mtp_gguf(tmp_path / "m.gguf", quant="Q8_0")
    found = []
    for n in (0, N_GUESSED):
        with opened(path, (1, 1), kv_type="f16", draft_vocab=n) as model:
            at = prefilled(model)
            found.append(model.runtime.runner.draft(IDS[at : at + 1], Batch.of_one(at, 1, 0)))
    assert np.array_equal(found[0][:, :N_GUESSED], found[1])


@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_more_tokens_than_there_are_cannot_be_guessed_from(tmp_path: Path, draft: str) -> None:
    path = mtp_gguf(tmp_path / "m.gguf")
    with pytest.raises(EngineError, match="only 320 tokens, not 321"):
        opened(path, draft=draft, draft_vocab=321)


@pytest.mark.parametrize("draft", ["auto", "ngram", "off"])
def test_some_tokens_to_guess_from_want_a_block(tmp_path: Path, draft: str) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", n_mtp=int(draft != "auto"))
    with pytest.raises(EngineError, match="A draft vocabulary of 256 tokens needs an MTP block"):
        opened(path, draft=draft, draft_vocab=N_GUESSED)
