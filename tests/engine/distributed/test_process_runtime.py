"""A model whose ranks are processes: rank 0 schedules answers, and the others follow it.

Here the processes are threads with queues in place of connections.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Finished, LoadParams, Model, SamplingParams
from engine.distributed.orders import FRAME, Orders
from engine.distributed.process_rank import ProcessRank, follow
from engine.distributed.rank_model import Leader
from engine.errors import CommError, ContextOverflow, EngineError, OutOfDeviceMemory, PromptError
from engine.forward.batch import Batch, Piece
from engine.generation.prompts import Prompts
from engine.generation.scheduling.stream import AnswerStream
from engine.gguf.reader import GGUFFile
from tests.helpers.golden import golden_path
from tests.helpers.queue_wires import Queues, QueueWire
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep torch's number of threads, which a process has for itself."""
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", quant="Q8_0", n_embd=128, n_head_kv=4, n_ff=128, n_ctx=600)


def params(path: Path, split: Sequence[float], **more: Any) -> LoadParams:
    given = {"devices": ("cpu",) * len(split), "split": tuple(split), "n_ctx": 512, "parallel": 3}
    return LoadParams(str(path), cpu_threads=1, **{**given, **more})


class Ranks:
    """Ranks of a model, of which all but the first follow on threads of their own.

    Attributes:
        leader: rank 0's side.
        ends: error with which each other rank has ended; None if it was told to.
    """

    def __init__(self, wanted: LoadParams) -> None:
        n = len(wanted.devices)
        self.queues = Queues(["cpu"] * n)
        wires = [QueueWire(self.queues, rank) for rank in range(n)]
        with GGUFFile.open(wanted.path) as file:
            self.ranks = [ProcessRank(file, wanted, wire) for wire in wires]
            prompts = Prompts(file, "model")
        orders = [Orders(wire) for wire in wires]
        self.leader = Leader(self.ranks[0], orders[0], prompts, 1 << 20)
        self.ends: dict[int, EngineError | None] = {}
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, orders[rank])) for rank in range(1, n)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int, orders: Orders) -> None:
        try:
            follow(self.ranks[number], orders)
            self.ends[number] = None
        except EngineError as error:
            self.ends[number] = error
            self.queues.is_broken.set()

    def sequences_of_passes(self) -> list[int]:
        """Return a list to which each pass adds the number of its sequences."""
        do, found = self.ranks[0].do, list[int]()

        def noted(order: str, *values: Any) -> Any:
            if order == "compute":
                found.append(len(values[1]))
            return do(order, *values)

        self.ranks[0].do = noted  # type: ignore[method-assign]
        return found

    def at_order(self, rank: int, n: int, act: Callable[[], None]) -> None:
        """Have a rank do something before its n-th order from now on."""
        do, left = self.ranks[rank].do, iter(range(n))

        def counted(order: str, *values: Any) -> Any:
            if next(left, None) is None:
                act()
            return do(order, *values)

        self.ranks[rank].do = counted  # type: ignore[method-assign]

    def close(self) -> None:
        self.leader.close()
        self.leader.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "it follows for ever"
        for rank in self.ranks:
            rank.close()


@contextmanager
def ranks_of(wanted: LoadParams) -> Iterator[Ranks]:
    made = Ranks(wanted)
    try:
        yield made
    finally:
        if made.leader._runtime._ended is not None:
            made.queues.is_broken.set()  # as when rank 0's process ends
        made.close()


def ids_of(events: Sequence[object]) -> list[int]:
    return [i for event in events for i in getattr(event, "ids", ())]


def at_once(answers: Sequence[AnswerStream]) -> list[list[int]]:
    """Return the tokens of answers, of which an event each is read in turn."""
    found: list[list[int]] = [[] for _ in answers]
    while not all(answer.is_over for answer in answers):
        for answer, ids in zip(answers, found, strict=True):
            ids += ids_of([next(answer, None)])
    return found


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

ASKED = [
    ([5, 6, 7, 9], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
    ([5, 6, 7, 9, 3], SamplingParams(seed=7, temperature=1.5, top_k=20, max_tokens=9)),
    ([8, 3] * 140, SamplingParams(seed=8, top_k=0, top_p=1, min_p=0, max_tokens=9)),
    ([7], SamplingParams(seed=9, repeat_penalty=1.5, presence_penalty=0.5, max_tokens=9)),
    ([9, 4] * 3, SamplingParams(seed=3, typical_p=0.8, top_k=0, max_tokens=9)),
    ([5, 6, 7, 9, 3, 3], SamplingParams(seed=4, top_k=0, top_p=0.9, temperature=3, max_tokens=9)),
]  # fmt: skip
"""Prompts, two of which begin alike, with settings that need few, many and all candidates."""

STATES = [5, 6, 7, 9], Batch((Piece(0, 4),), 1, wants_hidden=True)
"""Pass of which the hidden states are wanted."""


@pytest.mark.parametrize(
    ("name", "split", "more"),
    [
        ("", (3, 1), {}),
        ("", (2, 1, 1), {"parallel": 1}),
        ("", (0, 1), {"split_mode": "layer"}),
        ("", (1, 2), {"split_mode": "layer"}),
        ("jamba-q4_k_m", (2, 1), {}),
        ("gemma3-q4_0", (2, 1, 1), {"n_batch": 64, "n_ctx": 2560}),
    ],
    ids=["tensor", "three", "head elsewhere", "layers", "recurrent", "windows"],
)
def test_answers_are_those_of_threads_alone_and_at_once(
    path: Path, name: str, split: tuple[float, ...], more: dict[str, Any]
) -> None:
    wanted = params(golden_path(f"{name}.gguf") if name else path, split, **more)
    with Model(wanted) as model:
        expected = []
        for prompt, sampling in ASKED:
            expected.append(ids_of(list(model.generate(prompt, sampling))))
            model.scheduler.forget()
        n = 1900 if wanted.n_ctx == 2560 else 280  # windows hold six pages of the eight
        ids = [k * k % 200 + 3 for k in range(n)]
        logits = model.logits(ids)
        model.runtime.runner.clear_slot(0)
        hidden = model.runtime.runner.forward(*STATES)
    with ranks_of(wanted) as ranks:
        leader, n_sequences = ranks.leader, ranks.sequences_of_passes()
        assert at_once([leader.generate(*asked) for asked in ASKED]) == expected
        assert max(n_sequences) > 1 or wanted.parallel == 1
        assert [ids_of(list(leader.generate(*asked))) for asked in ASKED] == expected
        assert np.array_equal(leader.logits(ids), logits)
        assert ids_of(list(leader.generate(*ASKED[0]))) == expected[0]
        longer = [*ASKED[0][0], *expected[0], 5]
        last = list(leader.generate(longer, ASKED[0][1]))[-1]
        assert isinstance(last, Finished)
        assert last.usage.cached_tokens == len(longer) - 2
        leader._runtime.clear_slot(0)
        assert np.array_equal(leader._runtime.forward(*STATES), hidden)
    assert set(ranks.ends.values()) == {None}


def test_many_long_tables_are_sent_whole(path: Path) -> None:
    """An order that does not fit into the first message goes on in a second one."""
    queues = Queues(["cpu"] * 3)
    sender, *receivers = (Orders(QueueWire(queues, rank)) for rank in range(3))
    for n in (0, 1, FRAME - 60, FRAME - 30, FRAME - 16, FRAME, 3 * FRAME):
        sender.send("compute", "x" * n, [[1, (2, -3)], 0.1])
        for one in receivers:
            assert one.receive() == ("compute", ["x" * n, [[1, [2, -3]], 0.1]])
    assert all(way.empty() for way in queues.ways.values())


def test_who_is_cancelled_ends_and_the_others_go_on(path: Path) -> None:
    read: list[object] = []
    with ranks_of(params(path, (1, 1))) as ranks:
        leader = ranks.leader
        alone = ids_of(list(leader.generate(*ASKED[0])))
        other = leader.generate(*ASKED[0])
        cancelled = leader.generate([7] * 300, LONG, lambda: len(read) > 6)
        for event in cancelled:  # noqa: B007 the last one is looked at
            read.append(next(other, None))
        assert isinstance(event, Finished)
        assert event.reason == "cancelled"
        assert ids_of([*read, *other]) == alone
        dropped = leader.generate(*ASKED[3])
        next(dropped)
        dropped.close()
        assert ids_of(list(leader.generate(*ASKED[0]))) == alone
        assert not leader.scheduler.requests
    assert ranks.ends == {1: None}


@pytest.mark.parametrize("prompt", [[], [9999], [1] * 513], ids=len)
def test_a_prompt_that_means_nothing_harms_no_rank(path: Path, prompt: list[int]) -> None:
    with ranks_of(params(path, (1, 1))) as ranks:
        other = ranks.leader.generate(*ASKED[0])
        first = next(other)
        with pytest.raises(ContextOverflow if len(prompt) > 512 else PromptError):
            list(ranks.leader.generate(prompt, SamplingParams()))
        with pytest.raises(PromptError):
            ranks.leader.logits(prompt)
        assert len(ids_of([first, *other])) == 9
    assert ranks.ends == {1: None}


def fail() -> None:
    raise OutOfDeviceMemory("cpu", 3 << 30, 1 << 30, "to compute the next tokens")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_fails_on_one_rank_ends_all_answers(path: Path, rank: int) -> None:
    """No rank waits for ever, and nothing is computed by ranks that are at different places."""
    with ranks_of(params(path, (1, 1, 1))) as ranks, ExitStack() as asked:
        answers = [ranks.leader.generate(ASKED[n][0], LONG) for n in (0, 3)]
        for answer in answers:
            asked.callback(answer.close)
            next(answer)
        ranks.at_order(rank, 3, fail)
        why = OutOfDeviceMemory if rank == 0 else CommError
        with pytest.raises(why):
            list(answers[0])
        for more in (answers[1], ranks.leader.generate(*ASKED[0])):
            with pytest.raises(EngineError, match="are needed" if rank == 0 else "in the middle"):
                list(more)
        with pytest.raises(EngineError):
            ranks.leader.logits([3])
    own = ranks.ends.pop(rank, None)
    assert isinstance(own, OutOfDeviceMemory) or rank == 0
    assert all(isinstance(error, CommError) for error in ranks.ends.values())
    assert len(ranks.ends) == 2 - bool(rank)


def test_an_interruption_in_the_middle_of_an_order_is_told(path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with ranks_of(params(path, (1, 1))) as ranks:
        answer = ranks.leader.generate(ASKED[0][0], LONG)
        next(answer)
        ranks.at_order(0, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        with pytest.raises(EngineError, match="interrupted in the middle"):
            list(ranks.leader.generate(*ASKED[0]))


def test_once_it_is_closed_it_says_so(path: Path) -> None:
    with ranks_of(params(path, (1, 1))) as ranks:
        answer = ranks.leader.generate(*ASKED[0])
        next(answer)
        ranks.leader.close()
        with pytest.raises(EngineError, match="unloaded"):
            list(answer)
    assert ranks.ends == {1: None}


def test_states_that_nobody_needs_any_more_are_dropped_by_all_ranks() -> None:
    wanted = params(golden_path("jamba-q4_k_m.gguf"), (1, 1))
    with ranks_of(wanted) as ranks:
        for n in range(3):
            list(ranks.leader.generate([5 + n, 6], ASKED[0][1]))
        assert len(ranks.ranks[0]._kept) == 6
        ranks.leader.scheduler.forget()
        list(ranks.leader.generate([9], ASKED[0][1]))
    assert [len(rank._kept) for rank in ranks.ranks] == [1, 1]
