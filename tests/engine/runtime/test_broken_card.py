"""What is left after a GPU has stopped working: one sentence, and models on the CPU."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    EngineReady,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    Model,
    ModelLoaded,
    OutOfDeviceMemory,
    SamplingParams,
    SaveState,
    ThreadHost,
    list_devices,
    load_model,
    measure_device,
    measure_link,
)
from engine.backends.cpu.backend import CpuBackend
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.executor import RankExecutor, RankOutOfMemory
from engine.backends.gpu.comm.communicator import DeviceGroup
from engine.backends.gpu.decode.token_stream import TokenStream
from engine.backends.gpu.launch import kernel_launch, own_launcher
from engine.backends.gpu.launch.graph import NotRepeatable
from engine.errors import DeviceStopped
from engine.generation.state_file import StateFiles
from engine.hardware import backend_choice
from engine.hardware.card_records import CardVerdict
from engine.hardware.cuda_api import OUT_OF_MEMORY, CudaCallError
from engine.hardware.devices.topology import Routes
from engine.hardware.devices.visibility import mark_stopped, stopped_gpus
from engine.hardware.faults import call_all
from engine.parallel.rank_threads import RankThreads
from engine.runtime import kernel_proof, thread_runtime
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank import Rank
from tests.helpers.dead_card import fault, forget_stopped, install_dead_cards
from tests.helpers.fake_streams import FakeQueues, Machine
from tests.helpers.tiny_gguf import least_gguf, tiny_gguf

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
IDS = [5, 9, 3, 17, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SENTENCE = "cuda:0 has stopped working: device-side assert triggered."


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tiny_gguf(tmp_path / "m.gguf", n_ctx=64)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install GPUs that have died, whose kernels worked; return the calls of `torch.cuda`."""
    passed: Callable[[object], CardVerdict] = lambda info: CardVerdict("passed")  # noqa: E731
    monkeypatch.setattr(kernel_proof, "try_card", passed)
    monkeypatch.setattr(own_launcher, "prepare", lambda: "triton")
    monkeypatch.setattr(backend_choice, "_refused", {})
    return install_dead_cards(monkeypatch)[1]


def on_dead_gpu(model: Model) -> None:
    """Let a model on the CPU count as one on a GPU, so that a fault can be one of that GPU."""
    model.runtime.devices = [GPU] * len(model.runtime.devices)


def failing(*errors: BaseException) -> Callable[..., Any]:
    """Return a function that raises errors, one at each call."""
    left = list(errors)

    def fail(*args: object, **options: object) -> object:
        raise left.pop(0) if len(left) > 1 else left[0]

    return fail


def test_a_load_on_a_gpu_that_died_is_one_sentence_and_the_cpu_goes_on(
    path: Path, called: list[str]
) -> None:
    with pytest.raises(DeviceStopped, match=SENTENCE) as caught:
        load_model(path, ["cuda:0"])
    assert caught.value.hint == "Restart Tandem to use cuda:0 again; models still run on the CPU."
    assert called
    called.clear()
    with pytest.raises(DeviceStopped, match=SENTENCE):
        load_model(path, ["cpu", "cuda:0"])
    assert [info.id for info in list_devices() if info.usable] == ["cuda:1", "cuda:2", "cpu"]
    for devices in (["cpu"], ["cpu", "cpu"]):
        with load_model(path, devices, kv_on_host=True) as model:
            assert list(model.generate(IDS, GREEDY))
            assert model.logits(IDS).shape[0] == len(IDS)
            assert len(model.memory()) == len(devices)
    assert called == [], "neither refusing nor computing on the CPU asks CUDA for anything"


def test_measuring_a_gpu_that_died_is_one_sentence(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceStopped, match=SENTENCE):
        measure_device("cuda:0")
    monkeypatch.setattr("engine.runtime.measuring.link_speed._seconds", failing(fault()))
    with pytest.raises(DeviceStopped, match="cuda:1 has stopped working"):
        measure_link("cpu", "cuda:1")
    assert set(stopped_gpus()) == {"cuda:0", "cuda:1"}


class Desk:
    """A host, and the last event of each command."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[HostEvent] = queue.SimpleQueue()
        self.host = ThreadHost(self._events.put)
        assert isinstance(self._events.get(timeout=60).event, EngineReady)

    def load(self, path: Path, device: str) -> object:
        return self.run(Load(LoadParams(str(path), (device,))))

    def ask(self) -> object:
        return self.run(AnswerRequest((ChatMessage("user", "hello"),), sampling=GREEDY))

    @property
    def model(self) -> Model | None:
        return self.host._model

    def run(self, command: Any) -> object:
        generation = self.host.submit(command)
        while True:
            found = self._events.get(timeout=60)
            assert found.command_id == generation
            if isinstance(found.event, ModelLoaded | Finished | Failed):
                return found.event


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    assert made.host.close()


def load_on_dead_gpu(desk: Desk, path: Path) -> Model:
    """Load a model whose GPU dies afterwards."""
    assert isinstance(desk.load(path, "cpu"), ModelLoaded)
    model = desk.model
    assert model is not None
    on_dead_gpu(model)
    return model


def assert_stopped(event: object, *, is_model_lost: bool) -> None:
    """Check that a command failed because the GPU has stopped working, and said what helps."""
    assert isinstance(event, Failed)
    assert (str(event.error), event.is_model_lost) == (SENTENCE, is_model_lost)
    assert event.error.hint.startswith("Restart Tandem")


def assert_goes_on(desk: Desk, path: Path) -> None:
    """Check that the CPU takes a model, and answers."""
    assert isinstance(desk.load(path, "cpu"), ModelLoaded)
    assert isinstance(desk.ask(), Finished)


def test_a_model_on_the_cpu_stays_where_the_new_one_meets_a_dead_gpu(
    desk: Desk, path: Path, called: list[str]
) -> None:
    assert isinstance(desk.load(path, "cpu"), ModelLoaded)
    for _ in range(2):
        assert_stopped(desk.load(path, "cuda:0"), is_model_lost=False)
        assert isinstance(desk.ask(), Finished)


def test_a_model_whose_gpu_died_while_idle_gives_way_to_one_on_the_cpu(
    desk: Desk, path: Path, called: list[str]
) -> None:
    old = load_on_dead_gpu(desk, path)
    assert_goes_on(desk, path)
    assert not old.is_loaded


def test_a_model_whose_gpu_died_is_not_kept_where_the_new_one_fails_too(
    desk: Desk, path: Path, called: list[str]
) -> None:
    old = load_on_dead_gpu(desk, path)
    assert_stopped(desk.load(path, "cuda:0"), is_model_lost=True)
    assert not old.is_loaded
    assert desk.model is None
    assert_goes_on(desk, path)


def test_a_gpu_that_dies_in_the_middle_of_an_answer_is_named(
    desk: Desk, path: Path, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_on_dead_gpu(desk, path)
    with monkeypatch.context() as patch:
        patch.setattr(Rank, "compute", failing(fault()))
        assert_stopped(desk.ask(), is_model_lost=True)
    assert_goes_on(desk, path)


def test_a_gpu_that_dies_while_a_state_is_saved_is_named(
    desk: Desk, path: Path, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_on_dead_gpu(desk, path)
    list(model.generate(IDS, GREEDY))
    monkeypatch.setattr(StateFiles, "save", failing(fault()))
    failed = desk.run(SaveState(str(path.with_suffix(".state"))))
    assert_stopped(failed, is_model_lost=True)
    assert isinstance(desk.load(path, "cpu"), ModelLoaded)


def test_a_split_of_a_model_whose_gpu_died_closes_it(path: Path, called: list[str]) -> None:
    with load_model(path) as model:
        on_dead_gpu(model)
        mark_stopped("cuda:0", "device-side assert triggered")
        with pytest.raises(DeviceStopped, match=SENTENCE):
            model.resplit([1, 1], devices=["cuda:0", "cpu"])
        assert not model.is_loaded


@pytest.fixture
def streaming(
    tmp_path: Path, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Model]:
    """Load a model whose tokens are sampled by interpreted kernels."""
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
    with load_model(least_gguf(tmp_path / "least.gguf"), n_ctx=32, n_batch=4) as model:
        assert isinstance(model.runtime.token_source, TokenStream)
        on_dead_gpu(model)
        yield model


def test_a_gpu_that_dies_while_tokens_stream_is_named(
    streaming: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = streaming.runtime.token_source
    assert isinstance(source, TokenStream)
    monkeypatch.setattr(source, "_enqueue", failing(fault()))
    with pytest.raises(DeviceStopped, match=SENTENCE):
        list(streaming.generate([1, 2], GREEDY))
    assert not streaming.is_loaded


def test_a_gpu_that_dies_while_a_token_is_captured_does_not_count_as_slow(
    streaming: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found at the next token only, after a load that seemed to succeed."""
    error = NotRepeatable("device-side assert triggered")
    error.__cause__ = fault()
    monkeypatch.setattr(TokenStream, "prepare", failing(error))
    runner = streaming.runtime.runner
    monkeypatch.setattr(runner.executor, "devices", [GPU])
    runner.token_source = None
    with pytest.raises(DeviceStopped, match=SENTENCE):
        runner.sample_on_device()
    assert not streaming.is_loaded


CLOSING = [
    (RankThreads, "close"), (ModelRunner, "drop_recordings"), (Rank, "close"),
    (ThreadGroup, "close"), (thread_runtime, "release_scratch"),
    (thread_runtime, "release_cached_memory"),
]  # fmt: skip
"""All that closing a model calls."""


@pytest.mark.parametrize("at", range(len(CLOSING)))
@pytest.mark.parametrize("n", [1, 2])
def test_closing_raises_nothing_and_frees_the_rest(
    path: Path, at: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(path, ["cpu"] * n)
    done: list[str] = []
    with monkeypatch.context() as patch:
        for number, (owner, name) in enumerate(CLOSING):
            close: Any = getattr(owner, name)

            def step(
                *args: object, _close: Any = close, _name: str = f"{owner.__name__}.{name}",
                _fails: bool = number == at,
            ) -> None:  # fmt: skip
                done.append(_name)
                _close(*args)
                if _fails:
                    raise fault()

            patch.setattr(owner, name, step)
        model.close()
    assert set(done) == {f"{owner.__name__}.{name}" for owner, name in CLOSING}
    assert not model.is_loaded
    assert model.runtime.ranks == []
    model.close()
    with pytest.raises(EngineError, match="has been unloaded"):
        list(model.generate(IDS, GREEDY))


def test_a_failure_during_a_load_is_told_even_if_closing_fails_as_well(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "close", failing(fault()))
    progress: list[LoadProgress] = []
    with pytest.raises(EngineError, match="was cancelled"):
        load_model(path, ["cpu", "cpu"], on_progress=progress.append, is_cancelled=lambda: True)


def test_what_fails_is_logged_and_the_rest_is_called(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    call_all(
        failing(fault()), lambda: done.append(1), failing(ValueError()), lambda: done.append(2)
    )
    assert done == [1, 2]
    assert caplog.text.count("cleanup failed") == 2
    with pytest.raises(KeyboardInterrupt):
        call_all(failing(KeyboardInterrupt()))


def executor(devices: Sequence[torch.device]) -> RankExecutor:
    return RankExecutor(devices, ThreadGroup())


def test_the_rank_whose_gpu_died_is_told_from_one_without_memory(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    second = torch.device("cuda:1")
    ranks = executor([CPU, second])
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RankOutOfMemory) as caught:
        ranks.run(lambda rank: failing(full)() if rank else None)
    assert caught.value.rank == 1
    assert not stopped_gpus()
    with pytest.raises(DeviceStopped, match="cuda:1 has stopped working"):
        ranks.run(lambda rank: failing(fault())() if rank else None)
    ranks.close()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: out of memory"),
        CudaCallError("NVIDIA's driver reports 'no more'.", "", OUT_OF_MEMORY),
    ],
    ids=repr,
)
def test_a_full_memory_while_kernels_are_loaded_does_not_give_them_up(
    error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be refused for the rest of the process, which would then need more memory."""
    launch: Any = None
    monkeypatch.setattr(kernel_launch, "_compiled", failing(error))
    with pytest.raises(type(error)):
        kernel_launch.compile_launch(launch, GPU)

    def compile_ahead(*args: object) -> None:
        kernel_launch.compile_launch(launch, GPU)

    monkeypatch.setattr(CpuBackend, "compile_ahead", compile_ahead)
    monkeypatch.setattr(backend_choice, "_refused", {})
    with pytest.raises(OutOfDeviceMemory, match="to load the model"):
        load_model(path)
    assert not backend_choice.refused_kernels()


def test_gpus_that_cannot_be_settled_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault while ranks are waited for hides no other error, and what kernels use is kept."""
    machine = Machine(0)
    group = DeviceGroup([CPU, CPU], Routes(), queues=lambda device: FakeQueues(machine))  # type: ignore[arg-type, return-value]
    group.queues(0)
    group.abort()
    monkeypatch.setattr(group.marks, "until", failing(EngineError("NVIDIA's driver reports …")))
    group.settle()
    assert group._is_aborted_for_good
    monkeypatch.setattr(group.one_shots, "close", failing(fault()))
    group.close()
    assert not group._queues


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_stopped(monkeypatch)
