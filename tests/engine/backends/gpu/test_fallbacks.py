"""A model that falls back to a slower way says so, and only for as long as it does."""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    AnswerRequest,
    Command,
    EngineError,
    EngineReady,
    Event,
    Failed,
    Fallback,
    FallbacksChanged,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    Model,
    ModelLoaded,
    ModelResplit,
    Resplit,
    SamplingParams,
    ThreadHost,
    load_model,
)
from engine.backends.gpu.comm.communicator import device_group
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.decode import rank_capture
from engine.backends.gpu.decode.rank_capture import Unproven
from engine.backends.gpu.decode.token_stream import TokenStream
from engine.backends.gpu.launch.graph import NotRepeatable
from engine.hardware.devices.topology import Routes, Way
from engine.hardware.fallbacks import Fallbacks
from tests.helpers.tiny_gguf import least_gguf

NO_TEMPLATE = "This model has no chat template: plain text is used instead."
META = torch.device("meta")
OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=3, ignore_eos=True)
"""Settings that allow any token, which only the host can sample."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return least_gguf(tmp_path_factory.mktemp("models") / "m.gguf")


def failing(error: Exception, n: int = 1000) -> Callable[..., Any]:
    """Return a stand-in for `capture_on_all` that fails n times."""
    right, left = rank_capture.capture_on_all, [n]

    def capture(*args: object, **options: object) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return right(*args, **options)  # type: ignore[arg-type]

    return capture


def kinds(model: Model) -> list[str]:
    return [found.kind for found in model.fallbacks]


def run(model: Model, sampling: SamplingParams) -> None:
    assert len(list(model.generate([5, 9], sampling))) > 2


@pytest.mark.slow
def test_a_model_without_any_says_nothing(path: Path) -> None:
    with load_model(path, n_ctx=32) as model:
        run(model, GREEDY)
        assert model.fallbacks == ()
        assert model.warnings == (NO_TEMPLATE,)


def test_kernels_started_one_by_one_are_told_until_another_split_repeats_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = NotRepeatable("no kernel can read this cache")
    with monkeypatch.context() as patch:
        patch.setattr(rank_capture, "capture_on_all", failing(error))
        model = load_model(path, n_ctx=32)
    with model:
        (found,) = model.fallbacks
        assert (found.kind, found.devices, found.why) == ("graph", ("cpu",), str(error))
        assert model.warnings == (NO_TEMPLATE, found.sentence)
        run(model, GREEDY)
        assert model.fallbacks == (found,)
        model.runtime.fallbacks.report("weights", ["cpu"], "Q4_K came out wrong")
        (weights,) = set(model.fallbacks) - {found}
        model.resplit(None)
        run(model, GREEDY)
        assert model.fallbacks == (weights,), "weights that are handed over keep theirs"
        assert model.runtime.token_source is not None


def test_what_fails_after_the_load_is_told_as_well(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Fallbacks()
    monkeypatch.setattr("engine.runtime.kernel_proof.OF_THIS_PROCESS", shared)
    with load_model(path, n_ctx=32) as model:
        assert model.fallbacks == ()
        shared.report("compiling", (), "the disk is full")
        assert model.warnings[-1] == shared.current[0].sentence, "all of the process suffer from it"
        model.runtime.runner.recover()
        monkeypatch.setattr(rank_capture, "capture_on_all", failing(NotRepeatable("it snows")))
        run(model, GREEDY)
        said = "On cpu, kernels are launched one by one: it snows. "
        assert any(warning.startswith(said) for warning in model.warnings)


def test_ranks_whose_kernels_meet_no_more_say_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Unproven("a replayed token gives different results")
    monkeypatch.setattr(rank_capture, "capture_on_all", failing(error, 2))
    with load_model(path, ["cpu"] * 2, n_ctx=32) as model:
        exchange, sampling = model.fallbacks
        assert (exchange.kind, exchange.why) == ("exchange", str(error))
        assert (sampling.kind, sampling.devices) == ("sampling", ("cpu",))
        assert model.runtime.token_source is None


@pytest.mark.parametrize(
    "error",
    [EngineError("There is no pinned memory."),
     pytest.param(NotRepeatable("no"), marks=pytest.mark.slow)],
)  # fmt: skip
def test_tokens_drawn_by_the_host_are_told_until_the_device_draws_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "prepare", fail)
        model = load_model(path, n_ctx=32)
    with model:
        (found,) = model.fallbacks
        assert (found.kind, found.devices) == ("sampling", ("cpu",))
        assert found.why == str(error).rstrip(".")
        model.runtime.runner.recover()
        run(model, GREEDY)
        assert model.fallbacks == ()


@pytest.mark.slow
def test_settings_that_only_the_host_knows_are_told_until_the_next_answer(path: Path) -> None:
    with load_model(path, n_ctx=32) as model:
        run(model, OPEN)
        (found,) = model.fallbacks
        assert found.kind == "sampling"
        assert "top-k, top-p and min-p are off" in found.why
        assert found.help == "Other sampling settings are faster."
        run(model, GREEDY)
        assert model.fallbacks == ()


def test_ranks_that_need_their_hosts_for_a_token_say_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted kernels always involve the hosts, so these count as a GPU's."""
    with load_model(path, ["cpu"] * 2, n_ctx=32) as model:
        assert not model.runtime.runner.is_captured_whole
        assert kinds(model) == []
        for rank in model.runtime.ranks:
            monkeypatch.setattr(type(rank.backend), "compiles", True)
        model.runtime.runner.recover()
        run(model, GREEDY)
        assert kinds(model) == ["exchange"]


@pytest.mark.parametrize(
    ("n", "routes", "why"),
    [
        (9, Routes(), "there are more than 8"),
        (
            2,
            Routes({("meta", "cuda:1"): Way(None)}),
            "a test showed that kernels on one cannot write",
        ),
    ],
)
def test_kernels_that_cannot_meet_are_told(n: int, routes: Routes, why: str) -> None:
    found = Fallbacks()
    devices = [META] * (n - 1) + [torch.device("cuda", 1)]
    one_shots = OneShotGroups(devices, routes, fallbacks=found)
    assert one_shots.one_shot(0, tuple(range(n))) is None
    assert [(f.kind, f.devices) for f in found.current] == [("exchange", ("meta", "cuda:1"))]
    assert found.current[0].why.startswith(why)
    assert one_shots.one_shot(0, (0,)) is None
    assert len(found.current) == 1, "a single rank meets no other"


def test_memory_that_no_kernel_can_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("The system does not allow pinned memory that several GPUs can write to.")

    found = Fallbacks()
    group = device_group([META] * 2, Routes(), found)
    monkeypatch.setattr(OneShotGroups, "_connected", fail)
    assert group.one_shots.one_shot(0, (0, 1)) is None
    assert "not allow pinned memory" in found.current[0].why


@pytest.mark.slow
def test_a_host_tells_each_change_before_the_answer_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
    host = ThreadHost(events.put)
    assert isinstance(events.get(timeout=60).event, EngineReady)

    def told(command: Command) -> tuple[list[tuple[Fallback, ...]], Event]:
        """Return a command's report of fallbacks, and its closing event."""
        number, found = host.submit(command), list[tuple[Fallback, ...]]()
        while True:
            event = events.get(timeout=60)
            assert event.command_id == number
            if isinstance(event.event, FallbacksChanged):
                found.append(event.event.fallbacks)
            elif isinstance(event.event, ModelLoaded | ModelResplit | Finished | Failed):
                return found, event.event

    params = LoadParams(str(path), n_ctx=32)
    with monkeypatch.context() as patch:
        patch.setattr(rank_capture, "capture_on_all", failing(NotRepeatable("it snows")))
        changes, loaded = told(Load(params))
    assert isinstance(loaded, ModelLoaded)
    assert changes == []
    assert [f.kind for f in loaded.fallbacks] == ["graph"]
    assert loaded.warnings == (NO_TEMPLATE,), "each is reported once"
    assert told(AnswerRequest(prompt="a", sampling=GREEDY))[0] == []
    changes, done = told(Resplit(params))
    assert isinstance(done, ModelResplit)
    assert (changes, done.model.fallbacks) == ([], ())
    assert told(AnswerRequest(prompt="a", sampling=GREEDY))[0] == []
    ((found,),), _ = told(AnswerRequest(prompt="a", sampling=OPEN))
    assert found.kind == "sampling"
    assert told(AnswerRequest(prompt="a", sampling=OPEN))[0] == [], "it is known already"
    assert told(AnswerRequest(prompt="a", sampling=GREEDY))[0] == [()]
    assert host.close()


@pytest.mark.parametrize("writes", [pytest.param(True, marks=pytest.mark.slow), False])
def test_steps_without_a_kernel_are_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """They cannot be captured either."""
    monkeypatch.setattr("engine.backends.gpu.attention.attention", lambda *_: None)
    if not writes:
        monkeypatch.setattr("engine.backends.gpu.attention.write", lambda *_: False)
    with load_model(path, n_ctx=32) as model:
        run(model, GREEDY)
        told = {(found.kind, found.why) for found in model.fallbacks}
        expected = {"no kernel can read this cache"}
        if not writes:
            expected.add("no kernel can write to this cache")
        assert {why for kind, why in told if kind == "operations"} == expected
        assert "graph" in {kind for kind, _ in told}


def test_a_model_without_a_gpu_does_not_say_what_others_of_the_process_suffer_from(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Fallbacks()
    monkeypatch.setattr("engine.runtime.kernel_proof.OF_THIS_PROCESS", shared)
    shared.report("compiling", (), "the disk is full")
    monkeypatch.setenv("TANDEM_BACKEND", "graph")
    with load_model(path, n_ctx=32) as model:
        assert model.fallbacks == (), "it has no GPU"


def test_nccl_that_fails_its_trial_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(devices: object, queues: object, *, report: Callable[[str], None]) -> None:
        report("it returns wrong values")

    for name in ("CudaQueue", "new_stream"):
        monkeypatch.setattr(f"engine.backends.gpu.comm.nccl.{name}", lambda *_: None)
    monkeypatch.setattr("engine.backends.gpu.comm.nccl.tried", fail)
    found = Fallbacks()
    gpus = [torch.device("cuda", n) for n in range(2)]
    device_group(gpus, Routes(has_nccl=True), found)
    assert [f.title for f in found.current] == ["Between cuda:0 and cuda:1, NCCL is not used"]
    assert found.current[0].why == "it returns wrong values"
