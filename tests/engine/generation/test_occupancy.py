"""One model, several threads: who waits for whom, who is refused, and what closing does."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import (
    BenchTest,
    Cancelled,
    ContextShifted,
    EngineError,
    Finished,
    Model,
    ModelBusy,
    SamplingParams,
    load_model,
)
from tests.helpers import thread_storm
from tests.helpers.ahead import AheadSource
from tests.helpers.tiny_gguf import tiny_gguf

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAIT_S = 30.0

ENDING = """
import threading, time
from engine.generation.stream import Occupancy

def compute():
    while True:
        with occupancy.use("it computes"):
            print("begun", flush=True)
            has_begun.set()
            time.sleep(0.3)
            print("ended", flush=True)

occupancy, has_begun = Occupancy(), threading.Event()
threading.Thread(target=compute, daemon=True).start()
has_begun.wait()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=64)


@pytest.fixture(params=["host", "ahead"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """Yield a model whose tokens the host samples, and one that samples two tokens ahead."""
    with load_model(path, n_batch=8, kv_type="f32") as loaded:
        if request.param == "ahead":
            loaded.runtime.token_source = AheadSource(loaded.runtime.runner, 2)
        yield loaded


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Yield another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def ids_of(events: Any) -> list[int]:
    return [i for event in events for i in getattr(event, "ids", ())]


def answer(model: Model, *prompt: int) -> list[int]:
    return ids_of(model.generate(prompt, GREEDY))


def assert_waits(future: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        future.result(0.2)


def test_threads_are_answered_at_once(model: Model) -> None:
    prompts = [(5, 6), (9, 9), (7,), (5, 6, 7, 8)]
    wanted = [answer(model, *prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(answer, model, *prompt) for prompt in prompts]
        assert [one.result(WAIT_S) for one in found] == wanted


def test_one_thread_reads_several_answers_in_turn(model: Model) -> None:
    prompts = [(5, 6), (9, 9), (7,), (5, 6, 7, 8)]
    wanted = [answer(model, *prompt) for prompt in prompts]
    streams = [model.generate(prompt, GREEDY) for prompt in prompts]
    rows = list(itertools.zip_longest(*streams))
    found = [[event for event in column if event is not None] for column in zip(*rows, strict=True)]
    assert [ids_of(events) for events in found] == wanted


@pytest.mark.parametrize("is_kept", [True, False], ids=["closed", "dropped"])
def test_an_answer_that_is_closed_or_dropped_frees_its_pages(model: Model, is_kept: bool) -> None:
    events = model.generate([5, 6], GREEDY)
    next(events)
    (pool,) = model.scheduler.cache.pools
    assert pool.n_free == pool.n_pages - 1
    if is_kept:
        events.close()
        assert list(events) == []
    else:
        del events
    model.step()
    assert pool.n_free == pool.n_pages
    assert not model.scheduler.sequences


def test_an_answer_that_nobody_reads_stands_in_nobodys_way(
    model: Model, other: ThreadPoolExecutor
) -> None:
    """Not even one that has the only page there is."""
    wanted = [answer(model, 5, 6), answer(model, 9, 9)]
    events = model.generate([5, 6], GREEDY)
    begun = [next(events) for _ in range(4)]
    assert other.submit(answer, model, 9, 9).result(WAIT_S) == wanted[1]
    assert other.submit(model.logits, [9, 9]).result(WAIT_S).shape[0] == 2
    assert model.bench(BenchTest(n_gen=2), 1).samples_s
    assert ids_of([*begun, *events]) == wanted[0]


def test_other_threads_split_and_save_between_two_tokens(
    model: Model, other: ThreadPoolExecutor, tmp_path: Path
) -> None:
    wanted, found = answer(model, 5, 6), []
    events = model.generate([5, 6], GREEDY)
    for n, event in enumerate(events):
        found += ids_of([event])
        if n == 3:
            other.submit(model.resplit, [1, 1], devices=["cpu", "cpu"]).result(WAIT_S)
        if n == 5:
            saved = other.submit(model.save_state, tmp_path / "s").result(WAIT_S)
            assert 2 < saved.n_tokens == other.submit(lambda: model.n_cached).result(WAIT_S)
            assert len(other.submit(model.memory).result(WAIT_S)) == 2
    assert found == wanted


def test_threads_that_read_one_answer_share_its_events(model: Model) -> None:
    wanted = answer(model, 5, 6)
    events = model.generate([5, 6], GREEDY)
    with ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(ids_of, events) for _ in range(4)]
        assert sorted(i for part in parts for i in part.result(WAIT_S)) == sorted(wanted)


def test_an_answer_can_be_cancelled_while_it_waits(model: Model, other: ThreadPoolExecutor) -> None:
    stop = threading.Event()
    with model._occupancy.use("it is being tested"):
        later = other.submit(lambda: list(model.generate([9, 9], GREEDY, stop.is_set)))
        assert_waits(later)
        stop.set()
        (end,) = later.result(WAIT_S)
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"


def test_a_full_context_is_shifted_beside_other_answers(path: Path) -> None:
    shifting = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, on_overflow="shift")
    with load_model(path, n_ctx=16) as model:
        wanted = [ids_of(model.generate(prompt, shifting)) for prompt in ([5, 6], [9, 9])]
        for n_read in range(1, 18):  # the 16th event is the shift
            first = model.generate([5, 6], shifting)
            read = [next(first) for _ in range(n_read)]
            assert ids_of(model.generate([9, 9], shifting)) == wanted[1]
            assert ids_of([*read, *first]) == wanted[0]
        assert any(isinstance(event, ContextShifted) for event in read)


def test_closing_cancels_what_computes_and_refuses_who_waits(path: Path) -> None:
    model, begun = load_model(path), threading.Event()

    def is_cancelled() -> bool:
        begun.set()
        return False

    with ThreadPoolExecutor(2) as pool:
        test = BenchTest(n_gen=32)
        measuring = pool.submit(model.bench, test, 1_000_000, is_cancelled=is_cancelled)
        assert begun.wait(WAIT_S)
        waiting = pool.submit(model.logits, [5])
        assert_waits(waiting)
        model.close()
        with pytest.raises(Cancelled):
            measuring.result(WAIT_S)
        with pytest.raises(EngineError, match="unloaded"):
            waiting.result(WAIT_S)
    assert not model.is_loaded
    model.close()


def test_an_answer_of_a_closed_model_says_so(model: Model, other: ThreadPoolExecutor) -> None:
    events = model.generate([5, 6], GREEDY)
    next(events)
    other.submit(model.close).result(WAIT_S)
    for ask in (lambda: list(events), model.memory, lambda: model.n_cached):
        with pytest.raises(EngineError, match="unloaded"):
            ask()


def test_a_callback_cannot_call_the_model(path: Path, tmp_path: Path) -> None:
    """Not even from the thread of a rank, for which the call waits that it is in."""
    refused: list[str] = []

    def call(_: object = None) -> bool:
        with pytest.raises(ModelBusy) as error:
            model.logits([5])
        refused.append(str(error.value))
        return False

    with load_model(path) as model:
        assert len(ids_of(model.generate([5, 6], GREEDY, call))) == 12
        model.save_state(tmp_path / "s", on_progress=call)
        model.resplit([1, 1], devices=["cpu", "cpu"], on_progress=call, is_cancelled=call)
        assert len(answer(model, 5, 6)) == 12
    assert set(refused) == {
        "The model is busy: it is computing an answer.",
        "The model is busy: its state is being saved.",
        "The model is busy: it is being re-split.",
    }


def test_a_callback_can_close_the_model(path: Path) -> None:
    calls: list[Callable[[Model, Callable[[], bool]], object]] = [
        lambda model, close: model.resplit([1], is_cancelled=close),
        lambda model, close: list(model.generate([5, 6], GREEDY, close)),
    ]
    for call in calls:
        model = load_model(path)

        def close(model: Model = model) -> bool:
            model.close()
            assert model.is_loaded, "its memory is still in use"
            return False

        with pytest.raises(EngineError, match=r"cancelled|unloaded"):
            call(model, close)
        assert not model.is_loaded


def test_a_step_is_waited_for_no_longer_than_it_takes(path: Path) -> None:
    """A thread that waits has its turn between two tokens, however fast these follow each other."""
    long = SamplingParams(temperature=0, max_tokens=1_000_000, ignore_eos=True, on_overflow="shift")
    with load_model(path) as model, ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        reading = pool.submit(ids_of, model.generate([5, 6], long, stop.is_set))
        while not model.n_cached:
            time.sleep(0.01)
        for _ in range(20):
            begun = time.perf_counter()
            model.memory()
            assert time.perf_counter() - begun < 2
        assert not reading.done()
        stop.set()
        assert reading.result(WAIT_S)


def test_a_program_ends_behind_a_use() -> None:
    """Not in its middle, where Python would abort a thread that computes."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "ended"


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(600.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_storm_of_threads_gets_right_answers(seconds: float) -> None:
    command = [sys.executable, "-m", "tests.helpers.thread_storm", str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-8000:]}"
    counts = json.loads(done.stdout)
    for act in thread_storm.ACTS:
        assert counts[act] > 0, f"nobody could {act}: {counts}"
