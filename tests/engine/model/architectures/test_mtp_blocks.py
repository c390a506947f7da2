"""Files with several MTP blocks: the k-th guesses the k-th token, and reads the one before."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import LoadParams, Model, load_model
from engine.formats.gguf.reader import GGUFFile
from engine.generation.drafts import Drafts, MTPSource
from engine.model.architectures.declare import declare
from engine.model.forward.batch import Batch, Piece
from engine.planning.plan import make_plan
from engine.planning.planner import Planner
from tests.engine.generation.test_drafts import answers
from tests.engine.model.architectures.test_mtp import CHUNKS, IDS, SPLITS, opened, prefilled
from tests.helpers.model_draft import ModelDraft
from tests.helpers.mtp_models import N_LAYER, OWN, PlainMTP, apart, mtp_gguf
from tests.helpers.prophet import always
from tests.helpers.tiers import paired

ARCHITECTURES = "step35", "glm4moe", "qwen35"
"""With windows but for the last block, and reading raw and normed outputs."""

N_BLOCKS = 3


def check_chain(model: Model, plain: PlainMTP, text: Sequence[int], n: int) -> list[int]:
    """Check n guesses behind a text, of which all but the last token are computed; return them."""
    found, expected = [text[-1]], plain.chain_logits(text, n)
    for number in range(n):
        place = Batch.of_one(len(text) - 1 + number, 1, 0)
        logits = model.runtime.runner.draft(found[-1:], place, number)[0]
        np.testing.assert_allclose(logits, expected[number], atol=2e-5)
        found.append(int(logits.argmax()))
    return found[1:]


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("own", [(), OWN], ids=["trunk's", "own"])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_guesses_are_those_of_the_formulas(
    request: pytest.FixtureRequest, tmp_path: Path, arch: str, split: tuple[int, ...],
    own: tuple[str, ...], mode: str,
) -> None:  # fmt: skip
    """With kernels and without, as are the two modes; all are wrong, and leave nothing behind."""
    if mode == "layer":
        request.getfixturevalue("kernels")
    path = mtp_gguf(tmp_path / "m.gguf", arch, own=own, n_mtp=N_BLOCKS)
    plain = PlainMTP(path)
    logits = plain.trunk(IDS)
    with opened(path, split, split_mode=mode) as model:
        runner = model.runtime.runner
        assert runner.max_drafts == N_BLOCKS
        for at in range(prefilled(model), len(IDS)):
            check_chain(model, plain, IDS[: at + 1], N_BLOCKS)
            token, batch = IDS[at : at + 1], Batch.of_one(at, 1, 0)
            np.testing.assert_allclose(runner.forward(token, batch)[0], logits[at], atol=2e-5)


RIGHT = ((3, 3), (0, 2), (3, 1), (1, 3), (2, 0), (3, 3), (0, 0), (1, 1))
"""Numbers of right guesses of two sequences, chain by chain."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_guesses_behind_right_and_wrong_ones_are_those_of_the_formulas(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Check two sequences at once, also from recorded passes; the texts follow the guesses."""
    path = mtp_gguf(tmp_path / "m.gguf", arch, n_mtp=N_BLOCKS)
    plain, texts, lengths = PlainMTP(path), [IDS[:10], IDS[20:27]], [9, 6]
    with opened(path, split, parallel=2) as model:
        runner = model.runtime.runner
        tables = [tuple((seat,) for _ in runner.groups) for seat in range(2)]

        def places(behind: int, n: int = 1) -> tuple[Piece, ...]:
            """Return where n tokens of each text belong, from so many behind its last one on."""
            return tuple(
                Piece(lengths[s] + behind + i, 1, tables[s], s, s)
                for s in range(2)
                for i in range(n)
            )

        for s, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            runner.forward(text[:n], Batch((Piece(0, n, tables[s], s, s),), n))
        for n_right in RIGHT:
            chains, expected = [text[-1:] for text in texts], [
                plain.chain_logits(text, N_BLOCKS) for text in texts
            ]  # fmt: skip
            for number in range(N_BLOCKS):
                last = [chain[-1] for chain in chains]
                logits = runner.draft(last, Batch(places(number), 0), number)
                for s in range(2):
                    np.testing.assert_allclose(logits[s], expected[s][number], atol=2e-5)
                    chains[s].append(int(logits[s].argmax()))
            runner.forward([*chains[0], *chains[1]], Batch(places(0, 1 + N_BLOCKS), 0))
            for s, n in enumerate(n_right):
                other = (chains[s][n + 1] + 1 if n < N_BLOCKS else 7) % 300
                texts[s] += [*chains[s][1 : 1 + n], other]
                lengths[s] += 1 + n
        blocks = {block for block, _, _ in runner.ranks[0].draft_recordings}
        assert blocks == set(range(N_BLOCKS)), "passes over each were recorded"


LENGTHS = 1, 0, 0, 2, 1, 1, 3, 0, 1, 2, 3
"""Numbers of guesses that are made behind each token."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gap", [1, 30])
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_blocks_that_are_asked_less_often_read_more_at_once(
    tmp_path: Path, arch: str, split: tuple[int, ...], gap: int
) -> None:
    """Also more than is kept of hidden states, which are read before they are lost."""
    path = mtp_gguf(tmp_path / "m.gguf", arch, n_mtp=N_BLOCKS)
    plain = PlainMTP(path)
    text = np.random.default_rng(7).integers(3, 300, CHUNKS[0] + gap * len(LENGTHS) + 1).tolist()
    with opened(path, split, n_ctx=512) as model:
        runner, at = model.runtime.runner, CHUNKS[0]
        runner.forward(text[:at], Batch.of_one(0, at, at))
        for n in LENGTHS:
            check_chain(model, plain, text[: at + 1], n)
            for _ in range(gap):
                runner.forward(text[at : at + 1], Batch.of_one(at, 1, 0))
                at += 1


@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS))
def test_answers_are_those_without_guesses(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Alone and three at once, behind each other's beginnings, and behind a change of the split."""
    path = mtp_gguf(tmp_path / "m.gguf", arch, quant="Q8_0", n_mtp=N_BLOCKS)
    prompts = [[3 + (7 * n + i) % 190 for i in range(50 + n)] for n in range(3)]
    prompts.append(prompts[0][:40] + [9] * 20)
    devices, found = ["cpu"] * len(split), {}
    for draft in ("off", "mtp"):
        with load_model(path, devices, split, n_ctx=512, parallel=3, draft=draft) as model:

            def said(model: Model = model, draft: str = draft) -> list[list[list[int]]]:
                if draft == "mtp":
                    source = MTPSource(model.runtime.runner)
                    model.scheduler.drafts = Drafts(7, [source], always())
                return [answers(model, prompts), answers(model, prompts[:1])]

            found[draft] = said()
            model.resplit(split[::-1])
            found[draft] += said()
    assert found["mtp"] == found["off"]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("arch", "split"), paired(ARCHITECTURES, SPLITS[1:]))
def test_guesses_behind_a_change_of_the_split_are_those_of_the_formulas(
    tmp_path: Path, arch: str, split: tuple[int, ...]
) -> None:
    """Also where no more guesses than blocks are made, though more are asked for."""
    path = mtp_gguf(tmp_path / "m.gguf", arch, n_mtp=N_BLOCKS)
    plain = PlainMTP(path)
    with opened(path, split) as model:
        check_chain(model, plain, IDS[: prefilled(model) + 1], N_BLOCKS)
        model.resplit(split[::-1])
        check_chain(model, plain, IDS[: prefilled(model) + 1], N_BLOCKS)


@pytest.mark.parametrize("split", SPLITS)
def test_memory_is_planned(tmp_path: Path, split: tuple[int, ...]) -> None:
    """Keys and values of each block, too; a plan at a drag is that of a load."""
    path = mtp_gguf(tmp_path / "m.gguf", n_mtp=N_BLOCKS)
    planner, kv = Planner(path), {}
    for draft in ("off", "mtp"):
        params = LoadParams(str(path), ("cpu",) * len(split), split, n_ctx=64, draft=draft)
        with GGUFFile.open(path) as file:
            assert planner.plan(params) == make_plan(declare(file, params), params, None)
        with load_model(path, params.devices, split, n_ctx=64, draft=draft) as model:
            memory = model.memory()
        for rank in memory:
            assert rank.measured.weights == rank.predicted.weights
            assert rank.measured.kv == rank.predicted.kv
        kv[draft] = sum(rank.measured.kv for rank in memory)
    planner.close()
    # two ranks may share a key-value head, not in each block
    assert kv["mtp"] * N_LAYER >= kv["off"] * (N_LAYER + N_BLOCKS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("draft", ["beside", "named"])
def test_blocks_may_lie_in_a_file_of_their_own(
    tmp_path: Path, split: tuple[int, ...], draft: str
) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", "step35", own=OWN, n_mtp=N_BLOCKS)
    plain = PlainMTP(path)
    _, blocks = apart(path)
    with opened(path, split, "auto" if draft == "beside" else str(blocks)) as model:
        assert model.runtime.hp.n_mtp == N_BLOCKS
        check_chain(model, plain, IDS[: prefilled(model) + 1], N_BLOCKS)


def test_blocks_behind_one_that_is_missing_are_not_used(tmp_path: Path) -> None:
    """With two, the second guesses the second token, and there is no third one."""
    path = mtp_gguf(tmp_path / "m.gguf", "step35", n_mtp=4)
    plain, draft = PlainMTP(path), ModelDraft.read(path)
    gone = f"blk.{N_LAYER + 2}."
    draft.tensors = {n: t for n, t in draft.tensors.items() if not n.startswith(gone)}
    draft.write(path)
    with opened(path) as model:
        assert model.runtime.hp.n_mtp == model.runtime.runner.max_drafts == 2
        check_chain(model, plain, IDS[: prefilled(model) + 1], 2)


def test_a_part_that_one_block_alone_has_is_its_own(tmp_path: Path) -> None:
    """The trunk's stand in for what the others lack."""
    path = mtp_gguf(tmp_path / "m.gguf", "step35", own=OWN, n_mtp=N_BLOCKS)
    draft = ModelDraft.read(path)
    for name in OWN:
        del draft.tensors[f"blk.{N_LAYER + 1}.nextn.{name}.weight"]
    draft.write(path)
    with opened(path) as model:
        check_chain(model, PlainMTP(path), IDS[: prefilled(model) + 1], N_BLOCKS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_blocks_may_lie_on_other_ranks_than_the_one_before(tmp_path: Path, arch: str) -> None:
    path = mtp_gguf(tmp_path / "m.gguf", arch, n_mtp=N_BLOCKS)
    moved = [(rf"blk\.{N_LAYER + 1}\.", "cpu")]
    with opened(path, (0, 1, 2, 1), overrides=moved) as model:
        first, second, third = model.runtime.ranks[0].model.split.blocks[N_LAYER:]
        assert first.group == third.group
        assert not set(second.group) & set(first.group)
        text = IDS[: prefilled(model) + 1]
        check_chain(model, PlainMTP(path), text, N_BLOCKS)
