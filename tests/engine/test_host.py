"""The engine behind its queue: events, generations, cancelling, failures, the end."""

import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from engine import (
    ApplyTemplate,
    CacheCounted,
    Cancelled,
    ChatMessage,
    Command,
    ContextOverflow,
    ContextShifted,
    CountCache,
    CountTokens,
    Detokenize,
    Detokenized,
    Embed,
    EngineCrashed,
    EngineError,
    EngineHost,
    EngineReady,
    Event,
    Failed,
    Finished,
    Generate,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    LoadState,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    OutOfDeviceMemory,
    PrefillProgress,
    ProcessHost,
    Resplit,
    SamplingParams,
    SaveState,
    ScoreTokens,
    StateFileError,
    StateLoaded,
    StateProgress,
    StateSaved,
    TemplateApplied,
    ThreadHost,
    Tokenize,
    Tokenized,
    TokensCounted,
    TokensScored,
    TokenText,
    TokenTimes,
    Tool,
    Tune,
    Tuned,
    TuneProgress,
    TuneStarted,
    Unload,
)
from engine import errors as error_module
from engine.host import EventSink
from engine.inquiries.questions import Reply
from tests.helpers.new_threads import new_threads
from tests.helpers.tiny_gguf import tiny_gguf

LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, on_overflow="shift")
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ASK = (ChatMessage("user", "hello"),)


CLOSING = (
    ModelLoaded, ModelResplit, ModelUnloaded, Finished, StateSaved, StateLoaded, Tuned,
    Failed, *get_args(Reply),
)  # fmt: skip


HOSTS: dict[str, Callable[[EventSink], EngineHost]] = {
    "thread": ThreadHost, "process": ProcessHost,
}  # fmt: skip
"""The hosts that the same tests hold for. Tests that change the engine's insides need a thread."""


class Desk:
    """A host and the queue of its events."""

    def __init__(self, kind: str = "thread") -> None:
        self.events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.host = HOSTS[kind](self.events.put)
        ready = self.next()
        assert ready.generation == 0
        assert isinstance(ready.event, EngineReady)

    def next(self) -> HostEvent:
        return self.events.get(timeout=30)

    def closing(self, generation: int) -> Event:
        """Skip to the event that ends a command."""
        while True:
            found = self.next()
            assert found.generation == generation
            if isinstance(found.event, CLOSING):
                return found.event

    def closing_any(self) -> HostEvent:
        """Skip to the event that ends any command."""
        while not isinstance((found := self.next()).event, CLOSING):
            pass
        return found

    def run(self, command: Command) -> Event:
        return self.closing(self.host.submit(command))


@pytest.fixture
def thread_desk() -> Iterator[Desk]:
    """Return a desk whose engine is in this process."""
    before = threading.enumerate()
    made = Desk()
    yield made
    assert made.host.close()
    assert new_threads(before, "tandem-engine", "tandem-rank") == []


@pytest.fixture(scope="module")
def process_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def process_desk(process_home: Path) -> Iterator[Desk]:
    """Return a desk whose engine is in a process, started once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(process_home))
        before = threading.enumerate()
        made = Desk("process")
    yield made
    assert made.host.close()
    assert new_threads(before) == []


@pytest.fixture(params=list(HOSTS))
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Return a desk of each kind, without a model."""
    made: Desk = request.getfixturevalue(f"{request.param}_desk")
    yield made
    made.host.cancel()
    last = made.host.submit(Unload())
    while made.closing_any().generation != last:
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=64))


def test_a_model_loads_answers_and_leaves(desk: Desk, path: str) -> None:
    loaded = desk.run(Load(LoadParams(path, ("cpu", "cpu"), (3, 1))))
    assert isinstance(loaded, ModelLoaded)
    assert loaded.n_batch == 512
    assert [m.device for m in loaded.memory] == ["cpu", "cpu"]
    assert isinstance(desk.run(Generate(ASK, sampling=SHORT)), Finished)
    assert isinstance(desk.run(Unload()), ModelUnloaded)
    failed = desk.run(Generate(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)


def test_progress_ends_at_the_whole(desk: Desk, path: str) -> None:
    before = desk.host.submit(Unload())
    desk.closing(before)
    generation = desk.host.submit(Load(LoadParams(path)))
    last = None
    while isinstance(found := desk.next().event, LoadProgress):
        last = found
    assert isinstance(found, ModelLoaded)
    assert last is not None
    assert last.done_bytes == last.total_bytes > 0
    assert generation == before + 1


def test_cancel_ends_an_answer_within_a_token(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    generation = desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    desk.host.cancel()
    finished = desk.closing(generation)
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"
    assert isinstance(desk.run(Generate(ASK, sampling=SHORT)), Finished), "usable after"


def test_cancel_ends_commands_that_wait(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    running = desk.host.submit(Generate(ASK, sampling=LONG))
    waiting = desk.host.submit(Load(LoadParams(path)))
    desk.host.cancel()
    assert isinstance(desk.closing(running), Finished)
    failed = desk.closing(waiting)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Cancelled)
    assert isinstance(desk.run(Generate(ASK, sampling=SHORT)), Finished), "the old model stays"


def test_one_command_is_cancelled_and_the_others_go_on(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    first = desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    second = desk.host.submit(Generate(ASK, sampling=SHORT))
    third = desk.host.submit(Generate(ASK, sampling=SHORT))
    desk.host.cancel(second)
    desk.host.cancel(first)
    reasons = {}
    for _ in range(3):
        end = desk.closing_any()
        assert isinstance(end.event, Finished)
        reasons[end.generation] = end.event.reason
    assert reasons == {first: "cancelled", second: "cancelled", third: "length"}


def test_a_failed_load_keeps_the_old_model(desk: Desk, path: str, tmp_path: Path) -> None:
    desk.run(Load(LoadParams(path)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(path).read_bytes()[:-1000])
    for bad in (broken, tmp_path / "none.gguf", __file__):
        failed = desk.run(Load(LoadParams(str(bad))))
        assert isinstance(failed, Failed)
        assert not isinstance(failed.error, EngineCrashed)
    assert isinstance(desk.run(Generate(ASK, sampling=SHORT)), Finished)


def test_a_load_cancelled_midway_keeps_the_old_model(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    reached, go_on = threading.Event(), threading.Event()
    from engine.runtime.loader import ByteProgress

    original = ByteProgress.add

    def slow(self: ByteProgress, n_bytes: int) -> None:
        reached.set()
        go_on.wait(10)
        original(self, n_bytes)

    monkeypatch.setattr(ByteProgress, "add", slow)
    generation = thread_desk.host.submit(Load(LoadParams(path, ("cpu",) * 3)))
    assert reached.wait(10)
    thread_desk.host.cancel()
    go_on.set()
    failed = thread_desk.closing(generation)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Cancelled)
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)


def test_a_model_is_split_anew_and_remembers(desk: Desk, path: str) -> None:
    before = desk.run(Load(LoadParams(path, ("cpu", "cpu"), (3, 1))))
    assert isinstance(before, ModelLoaded)
    assert isinstance(first := desk.run(Generate(ASK, sampling=SHORT)), Finished)
    params = LoadParams(path, ("cpu",) * 3, (1, 2, 1))
    generation = desk.host.submit(Resplit(params))
    seen = []
    while isinstance((found := desk.next()).event, LoadProgress):
        seen.append(found)
    assert seen
    assert {event.generation for event in [*seen, found]} == {generation}
    assert isinstance(found.event, ModelResplit)
    assert found.event.model.params == params
    assert found.event.model.model_hash == before.model_hash != ""
    assert [m.device for m in found.event.model.memory] == ["cpu"] * 3
    assert found.event.n_tokens == first.usage.prompt_tokens + 4
    second = desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(second, Finished)
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1


def test_an_answer_goes_on_over_a_resplit(desk: Desk, path: str) -> None:
    """Re-splits are done between two tokens, a load waits until all answers have ended."""
    desk.run(Load(LoadParams(path, parallel=2)))
    text = desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    first = desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 2, parallel=2)))
    other = desk.host.submit(Generate(ASK, sampling=LONG))
    second = desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 3, parallel=2)))
    load = desk.host.submit(Load(LoadParams(path)))
    waiting = desk.host.submit(Generate(ASK, sampling=SHORT))
    order = []
    while len(order) < 2:
        found = desk.next()
        assert found.generation in (text, first, other, second)
        if isinstance(found.event, ModelResplit):
            order.append(found.generation)
    assert order == [first, second]
    heard = set()
    while heard != {text, other}:
        found = desk.next()
        assert isinstance(found.event, TokenText | PrefillProgress | ContextShifted | TokenTimes)
        heard.add(found.generation)
    for generation in (text, other):
        desk.host.cancel(generation)
    ends = [desk.closing_any() for _ in range(4)]
    assert {end.generation for end in ends[:2]} == {text, other}
    assert [end.generation for end in ends[2:]] == [load, waiting]
    assert [type(end.event) for end in ends] == [Finished, Finished, ModelLoaded, Finished]


def test_an_error_behind_an_event_of_the_same_pass_is_told(desk: Desk, path: str) -> None:
    """The oldest message is left out, and the last one is too long even so."""
    desk.run(Load(LoadParams(path)))
    talk = (*ASK, ChatMessage("assistant", "hello"), ChatMessage("user", "hello " * 100))
    number = desk.host.submit(Generate(talk, sampling=LONG))
    assert isinstance(desk.next().event, ContextShifted)
    failed = desk.closing(number)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ContextOverflow)
    assert failed.error.is_of_last
    assert str(failed.error).startswith("Even without older messages, the prompt has ")
    assert isinstance(desk.run(Generate(ASK, sampling=SHORT)), Finished)


def test_tokens_are_counted(desk: Desk, path: str) -> None:
    failed = desk.run(CountTokens(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)
    desk.run(Load(LoadParams(path)))
    counted = desk.run(CountTokens(ASK, "world"))
    draft = desk.run(CountTokens(None, "world"))
    assert isinstance(counted, TokensCounted)
    assert draft == TokensCounted(None, counted.n_draft)
    talk = (ChatMessage("user", "hello\n\nworld"),)  # the draft is a part of the last message
    ended = desk.run(Generate(talk, sampling=SHORT))
    assert isinstance(ended, Finished)
    assert counted.n_before is not None
    assert counted.n_before + counted.n_draft == ended.usage.prompt_tokens


@pytest.mark.parametrize(
    "question",
    [
        CountTokens((), "world"),
        Tokenize("hello"),
        Detokenize((5, 6)),
        ApplyTemplate(ASK),
        Embed(("hello", (5, 6))),
        ScoreTokens((5, 6, 7), 2),
        ScoreTokens("hello"),
        CountCache(),
    ],
    ids=str,
)
def test_questions_are_answered_in_the_middle_of_an_answer(
    desk: Desk, path: str, question: Command
) -> None:
    desk.run(Load(LoadParams(path)))
    text = desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    number = desk.host.submit(question)
    while (found := desk.next()).generation != number:
        assert not isinstance(found.event, CLOSING)
    assert isinstance(found.event, get_args(Reply))
    desk.host.cancel()
    assert isinstance(desk.closing(text), Finished)


def test_a_text_is_scored_as_the_prompt_that_it_would_be(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    found = desk.run(ScoreTokens("hello world", 1))
    assert isinstance(found, TokensScored)
    again = desk.run(ScoreTokens(found.ids, 1))
    assert again == found
    ended = desk.run(Generate(prompt="hello world", sampling=SHORT))
    assert isinstance(ended, Finished)
    assert len(found.ids) == len(found.logprobs) + 1 == ended.usage.prompt_tokens


def test_the_cache_is_used_by_answers_and_then_kept(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    assert desk.run(CountCache()) == CacheCounted(0, 0)
    text = desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    number = desk.host.submit(CountCache())
    while (found := desk.next()).generation != number:
        assert not isinstance(found.event, CLOSING)
    assert isinstance(found.event, CacheCounted)
    assert found.event.n_used in range(256, 1025, 256)
    desk.host.cancel()
    assert isinstance(desk.closing(text), Finished)
    after = desk.run(CountCache())
    assert isinstance(after, CacheCounted)
    assert after.n_used == 0
    assert after.n_kept > 0


def test_the_text_of_tokens_is_the_text_they_were_made_of(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path)))
    said = "hello  world ? \u00e9</s>"
    found = desk.run(Tokenize(said, has_pieces=True))
    assert isinstance(found, Tokenized)
    whole = b"".join(map(bytes, found.pieces)).decode()
    assert whole == " " + said, "SPM begins with a space"
    assert any(bytes(piece) == b"\xc3" for piece in found.pieces), "a part of a character"
    back = desk.run(Detokenize(found.ids, has_pieces=True))
    assert back == Detokenized(said, found.pieces)
    assert desk.run(Detokenize(found.ids, skip_special=True)) == Detokenized(said[:-4])
    failed = desk.run(Detokenize((10**9,)))
    assert isinstance(failed, Failed)
    assert "There are token ids outside 0 to" in str(failed.error)


def test_a_written_prompt_is_that_of_an_answer(desk: Desk, path: str) -> None:
    """Its tokens are those that an answer computes, also where it is continued."""
    desk.run(Load(LoadParams(path)))
    talk = (*ASK, ChatMessage("assistant", "the model"))
    for messages, is_continued in ((ASK, False), (talk, True)):
        written = desk.run(ApplyTemplate(messages, continue_last=is_continued))
        assert isinstance(written, TemplateApplied)
        tokens = desk.run(Tokenize(written.prompt, add_special=True))
        assert isinstance(tokens, Tokenized)
        ended = desk.run(Generate(messages, sampling=SHORT, continue_last=is_continued))
        assert isinstance(ended, Finished)
        assert len(tokens.ids) == ended.usage.prompt_tokens
    bare = desk.run(ApplyTemplate(ASK, add_generation_prompt=False))
    full = desk.run(ApplyTemplate(ASK))
    assert isinstance(bare, TemplateApplied)
    assert isinstance(full, TemplateApplied)
    assert full.prompt == bare.prompt + "Assistant:"
    told = desk.run(ApplyTemplate(ASK, tools=(Tool("look_up"),)))
    assert isinstance(told, TemplateApplied)
    assert "look_up" in told.prompt
    for asked, sentence in (
        (ApplyTemplate(()), "no message"), (ApplyTemplate(ASK, variables="[]"), "variables"),
    ):  # fmt: skip
        failed = desk.run(asked)
        assert isinstance(failed, Failed)
        assert sentence in str(failed.error)


def test_a_resplit_that_fails_or_is_cancelled_changes_nothing(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = thread_desk.run(Resplit(LoadParams(path)))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)
    thread_desk.run(Load(LoadParams(path)))
    for bad in (LoadParams(path, n_ctx=32), LoadParams(path, ("cpu",), (1, 2))):
        failed = thread_desk.run(Resplit(bad))
        assert isinstance(failed, Failed)
        assert not failed.is_model_lost
    running = thread_desk.host.submit(Generate(ASK, sampling=SHORT))
    waiting = thread_desk.host.submit(Resplit(LoadParams(path, ("cpu",) * 2)))
    thread_desk.host.cancel()
    ends = {
        end.generation: end.event for end in (thread_desk.closing_any(), thread_desk.closing_any())
    }
    assert isinstance(ends[running], Finished)
    assert isinstance(cancelled := ends[waiting], Failed)
    assert isinstance(cancelled.error, Cancelled)
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)
    monkeypatch.setattr("engine.runtime.resplit.Transfer.undo", lambda self: 1 / 0)
    monkeypatch.setattr("engine.runtime.resplit.load_rank", lambda *args: 1 / 0)
    lost = thread_desk.run(Resplit(LoadParams(path, ("cpu",) * 2)))
    assert isinstance(lost, Failed)
    assert lost.is_model_lost
    failed = thread_desk.run(Generate(ASK))
    assert isinstance(failed, Failed)
    assert "No model is loaded" in str(failed.error)


def test_a_state_goes_to_a_file_and_comes_back(desk: Desk, path: str, tmp_path: Path) -> None:
    file = str(tmp_path / "chat.state")
    for command in (SaveState(file), LoadState(file)):
        failed = desk.run(command)
        assert isinstance(failed, Failed)
        assert "No model is loaded" in str(failed.error)
    desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    first = desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(first, Finished)
    generation = desk.host.submit(SaveState(file))
    assert isinstance(desk.next().event, StateProgress)
    saved = desk.closing(generation)
    n = first.usage.prompt_tokens + 4
    assert saved == StateSaved(file, n, Path(file).stat().st_size)
    desk.run(Load(LoadParams(path)))
    loaded = desk.run(LoadState(file))
    assert isinstance(loaded, StateLoaded)
    assert len(loaded.ids) == n
    again = desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(again, Finished)
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1
    failed = desk.run(LoadState(str(tmp_path / "none")))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StateFileError)


def test_each_answer_has_a_state_of_its_own(
    thread_desk: Desk, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.host.MOST_ENDED", 2)
    thread_desk.run(Load(LoadParams(path, parallel=4)))
    texts = ("one", "and two", "and now there are three")
    asked = [
        thread_desk.host.submit(Generate((ChatMessage("user", text),), sampling=SHORT))
        for text in texts
    ]
    ends = {end.generation: end.event for end in (thread_desk.closing_any() for _ in texts)}
    too_old = next(iter(ends))
    failed = thread_desk.run(SaveState(str(tmp_path / "old"), too_old))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StateFileError)
    assert "after so many others" in str(failed.error)
    assert not list(tmp_path.iterdir())
    for number in set(asked) - {too_old}:
        end = ends[number]
        assert isinstance(end, Finished)
        told = thread_desk.run(SaveState(str(tmp_path / str(number)), number))
        assert isinstance(told, StateSaved)
        assert told.n_tokens == end.usage.total_tokens - 1


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the engine's files: the test's own for an engine in this process."""
    if "[process" in request.node.name:
        return request.getfixturevalue("process_home")  # type: ignore[no-any-return]
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("other", [{}, {"n_ctx": 48}], ids=["same model", "other context"])
def test_a_search_leaves_model_and_conversation_as_they_were(
    desk: Desk, path: str, other: dict[str, int]
) -> None:
    params = LoadParams(path, ("cpu",) * 3, (1, 2, 1))
    before = desk.run(Load(params))
    assert isinstance(before, ModelLoaded)
    assert isinstance(first := desk.run(Generate(ASK, sampling=SHORT)), Finished)
    generation = desk.host.submit(Tune(LoadParams(path, ("cpu", "cpu"), **other), budget_s=3))
    assert isinstance(desk.next().event, TuneStarted)
    assert isinstance(progress := desk.next().event, TuneProgress)
    assert progress.best == progress.trial
    tuned = desk.closing(generation)
    assert isinstance(tuned, Tuned)
    assert tuned.result.winner is not None
    assert tuned.result.model_hash == before.model_hash
    assert tuned.model is not None
    assert tuned.model.params == params
    assert [m.device for m in tuned.model.memory] == ["cpu"] * 3
    second = desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(second, Finished)
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1


def test_a_search_can_be_cancelled_and_needs_no_model(desk: Desk, path: str, home: Path) -> None:
    generation = desk.host.submit(Tune(LoadParams(path, ("cpu", "cpu")), "prompts", 60))
    while not isinstance(desk.next().event, TuneProgress):
        pass
    desk.host.cancel()
    tuned = desk.closing(generation)
    assert isinstance(tuned, Tuned)
    assert tuned.model is None
    assert not tuned.result.is_complete
    assert tuned.result.trials
    assert isinstance(desk.run(Generate(ASK)), Failed), "nothing stays loaded"
    assert {file.name for file in (home / "cache").iterdir()} >= {"tunings.json"}
    assert not list((home / "cache").glob("tandem-*")), "no conversation is left behind"
    for bad in (Tune(LoadParams(__file__)), Tune(LoadParams(path), "what")):
        assert isinstance(desk.run(bad), Failed)


@pytest.mark.usefixtures("home")
def test_a_search_that_fails_brings_the_model_back_or_says_that_it_is_lost(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    monkeypatch.setattr("engine.tuning.TrialModel.measure", lambda *args: 1 / 0)
    failed = thread_desk.run(Tune(LoadParams(path, ("cpu", "cpu"), n_ctx=48)))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineCrashed)
    assert not failed.is_model_lost
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)

    def gone(*args: object, **options: object) -> None:
        raise EngineError("The file is gone.")

    monkeypatch.setattr("engine.tuning.Model", gone)
    failed = thread_desk.run(Tune(LoadParams(path, ("cpu", "cpu"), n_ctx=48)))
    assert isinstance(failed, Failed)
    assert failed.is_model_lost


def test_some_tokens_say_where_their_time_went(desk: Desk, path: str) -> None:
    desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    for every, n in ((16, 2), (3, 13), (0, 0)):
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        generation = desk.host.submit(Generate(ASK, sampling=sampling, timed_every=every))
        found = []
        while not isinstance(event := desk.next().event, Finished):
            if isinstance(event, TokenTimes):
                found.append(event)
        assert len(found) == n, generation
        for earlier, later in itertools.pairwise(found):
            assert later.position - earlier.position == every
        for times in found:
            assert len(times.ranks) == 2
            assert all(0 < r.computed_s + r.waited_s <= times.seconds for r in times.ranks)
    failed = desk.run(Generate(ASK, timed_every=-1))
    assert isinstance(failed, Failed)


def test_a_model_makes_room_for_one_that_does_not_fit_beside_it(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model is loaded again when the new one fails for another reason."""
    thread_desk.run(Load(LoadParams(path)))

    from engine.runtime import thread_runtime

    calls = []
    original = thread_runtime.make_plan

    def first_is_full(*args: object) -> object:
        calls.append(args)
        if len(calls) in (1, 3, 4):
            raise OutOfDeviceMemory("cpu", 2 << 30, 1 << 30, "to load the model")
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(thread_runtime, "make_plan", first_is_full)
    assert isinstance(thread_desk.run(Load(LoadParams(path, n_ctx=32))), ModelLoaded)
    failed = thread_desk.run(Load(LoadParams(path)))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfDeviceMemory)
    assert len(calls) == 5, "the old one was planned again"
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)


def test_a_bug_is_reported_and_the_engine_goes_on(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread_desk.run(Load(LoadParams(path)))
    from engine.layers.mixers.attention import Attention

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "project", lambda *args: 1 / 0)
        failed = thread_desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineCrashed)
    assert "ZeroDivisionError" in str(failed.error)
    assert "ZeroDivisionError" in caplog.text, "the log has the traceback"
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)


def test_out_of_memory_ends_only_that_answer(
    thread_desk: Desk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_desk.run(Load(LoadParams(path, ("cpu", "cpu"))))
    from engine.cpu.ops import CpuOps

    def exhausted(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "gated", exhausted)
        failed = thread_desk.run(Generate(ASK, sampling=SHORT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfDeviceMemory)
    assert "cpu has" in str(failed.error)
    assert isinstance(thread_desk.run(Generate(ASK, sampling=SHORT)), Finished)


@pytest.mark.parametrize("kind", HOSTS)
def test_closing_while_generating_ends_in_time(path: str, kind: str) -> None:
    desk = Desk(kind)
    desk.run(Load(LoadParams(path)))
    desk.host.submit(Generate(ASK, sampling=LONG))
    while not isinstance(desk.next().event, TokenText):
        pass
    assert desk.host.close(timeout_s=5)


def test_commands_and_events_can_be_pickled(path: str, thread_desk: Desk) -> None:
    loaded = thread_desk.run(Load(LoadParams(path)))
    commands = Load(LoadParams(path)), Generate(ASK), Unload(), Resplit(LoadParams(path))
    for thing in (*commands, SaveState("x"), LoadState("x"), HostEvent(1, loaded)):
        assert pickle.loads(pickle.dumps(thing)) == thing


ERRORS = [
    error_module.EngineError("What.", "Do."),
    error_module.InvalidGGUF("a.gguf", "it is broken"),
    error_module.MissingShard("a.gguf", ["b.gguf"]),
    error_module.UnsupportedArchitecture("a.gguf", "x", ["llama"]),
    error_module.UnsupportedQuant("a.gguf", "Q9", "w"),
    error_module.NoDevice("cuda:9", "why"),
    error_module.OutOfDeviceMemory("cpu", 2, 1, "to load"),
    error_module.CommError(1, "stalled", "cuda:1"),
    error_module.ContextOverflow(5, 4),
    error_module.ContextOverflow(9, 4, 5),
    error_module.StateFileError("chat.state", "It is damaged."),
    error_module.Cancelled("Loading"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling_with_all_they_know(error: EngineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert str(error).endswith(".")
