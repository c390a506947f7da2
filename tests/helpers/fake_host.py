"""An engine host without an engine, which answers commands from a script on its own thread."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine import (
    GOALS,
    Cancelled,
    Command,
    CountTokens,
    DeviceMemory,
    EngineError,
    EngineReady,
    Event,
    Failed,
    Fallback,
    Finished,
    Generate,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    LoadState,
    MemoryUse,
    ModelInfo,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Resplit,
    Sample,
    SaveState,
    StateLoaded,
    StateProgress,
    StateSaved,
    Timings,
    TokensCounted,
    TokenText,
    Trial,
    Tune,
    Tuned,
    TuneEstimate,
    TuneProgress,
    TuneResult,
    TuneStarted,
    Usage,
)
from engine.planning.search.estimate import TrialSize

GIB = 1 << 30


def model_info(path: str = "/models/tiny-chat-q4_k_m.gguf", **changes: object) -> ModelInfo:
    """Return a header like that of a small chat model."""
    values: dict[str, object] = {
        "path": path, "name": "Tiny Chat", "architecture": "llama", "supported": True,
        "n_layer": 22, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_vocab": 32000,
        "n_ctx_train": 4096, "n_params": 1_100_000_000, "n_bytes": 668_000_000, "quant": "Q4_K_M",
        "has_chat_template": True, "tensor_types": (("Q4_K", 135), ("Q6_K", 21), ("F32", 45)),
    }  # fmt: skip
    return ModelInfo(**(values | changes))  # type: ignore[arg-type]


def model_loaded(
    params: LoadParams, warnings: tuple[str, ...] = (), fallbacks: tuple[Fallback, ...] = ()
) -> ModelLoaded:
    use = MemoryUse(weights=GIB // 2, kv=GIB // 8, compute=GIB // 16)
    return ModelLoaded(
        info=model_info(params.path),
        params=params,
        n_ctx=params.n_ctx or 4096,
        memory=tuple(DeviceMemory(device, use, use) for device in params.devices),
        seconds=0.1,
        warnings=warnings,
        fallbacks=fallbacks,
        n_batch=2048,
    )


@dataclass
class Script:
    """The script of the events that the next commands lead to.

    Attributes:
        pause_s: pause between two events, in seconds; a cancellation ends it early.
        hold: while set, a command waits for its cancellation after `hold_after` events.
    """

    answer: str = "Hello from the **fake** model."
    reason: str = "stop"
    chunk: int = 4
    pause_s: float = 0.0
    start_error: EngineError | None = None
    load_error: EngineError | None = None
    loses_model: bool = False
    answer_error: EngineError | None = None
    state_error: EngineError | None = None
    tune_error: EngineError | None = None
    warnings: tuple[str, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    hold: bool = False
    hold_after: int = 0
    n_load_steps: int = 4
    extra: list[Event] = field(default_factory=list)


class FakeHost:
    """A host with the interface and the order of events of the real one."""

    def __init__(self, on_event: Callable[[HostEvent], None], script: Script | None = None) -> None:
        self.script = script or Script()
        self.commands: list[Command] = []
        self.counts: list[Command] = []
        self._on_event = on_event
        self._queue: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._generation = self._cancelled_up_to = 0
        self._changed = threading.Condition()
        self._loaded: ModelLoaded | None = None
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._thread.start()
        self._counting = self._thread  # the last thread that has counted

    def submit(self, command: Command) -> int:
        self._generation += 1
        if isinstance(command, CountTokens):  # in the middle of an answer, too
            self.counts.append(command)
            answer = self._generation, _counted(command)
            self._counting = threading.Thread(target=self.send, args=answer, name="fake-count")
            self._counting.start()
        else:
            self.commands.append(command)
            self._queue.put((self._generation, command))
        return self._generation

    def cancel(self) -> None:
        with self._changed:
            self._cancelled_up_to = self._generation
            self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> bool:
        self.cancel()
        self._queue.put(None)
        self._counting.join(timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def send(self, generation: int, event: Event) -> None:
        """Deliver an event, as from a command that nobody waits for any more."""
        self._on_event(HostEvent(generation, event))

    def _run(self) -> None:
        error = self.script.start_error
        self.send(0, EngineReady("0.0", 0.0) if error is None else Failed(error))
        while (item := self._queue.get()) is not None:
            number, command = item
            if isinstance(command, Load):
                self._load(number, command)
            elif isinstance(command, Generate):
                self._generate(number)
            elif isinstance(command, Resplit):
                self._load(number, command)
            elif isinstance(command, SaveState | LoadState):
                self._move_state(number, command)
            elif isinstance(command, Tune):
                self._tune(number, command)
            else:
                self._loaded = None
                self.send(number, ModelUnloaded())

    def _move_state(self, number: int, command: SaveState | LoadState) -> None:
        self.send(number, StateProgress(1, 2))
        if self._pause(number, 1):
            self.send(number, Failed(Cancelled("Saving")))
        elif self.script.state_error is not None:
            self.send(number, Failed(self.script.state_error))
        elif isinstance(command, SaveState):
            self.send(number, StateSaved(command.path, 20, 4096))
        else:
            self.send(number, StateLoaded(command.path, (1, 2, 3)))

    def _tune(self, number: int, command: Tune) -> None:
        """Try each device alone, then all of them; the first one is the fastest."""
        if self.script.tune_error is not None:
            self.send(number, Failed(self.script.tune_error, self.script.loses_model))
            return
        devices, trials, is_ended = command.params.devices, list[Trial](), False
        sets = [(device,) for device in dict.fromkeys(devices)] + [devices] * (len(devices) > 1)
        self.send(
            number, TuneStarted(TuneEstimate(len(sets), 1.0, 60.0, len(sets), TrialSize(256, 32)))
        )
        for at, chosen in enumerate(sets):
            if is_ended := self._pause(number, at):
                break
            params = replace(command.params, devices=chosen, split=None)
            sample = Sample((800.0 - at, 820.0), (40.0 - at, 41.0))
            trials.append(Trial(params, (1 / len(chosen),) * len(chosen), sample))
            self.send(number, TuneProgress(at + 1, len(sets), trials[-1], trials[0]))
        result = TuneResult(
            "Tiny Chat", "ab", 4096, "devices", GOALS[command.goal], tuple(trials),
            best=0 if trials else None, reason="It is the first.", is_complete=not is_ended,
        )  # fmt: skip
        self.send(number, Tuned(result, self._loaded))

    def _load(self, number: int, command: Load | Resplit) -> None:
        script = self.script
        for step in range(script.n_load_steps):
            self.send(number, LoadProgress(step, script.n_load_steps))
            if self._pause(number, step):
                self.send(number, Failed(Cancelled("Loading")))
                return
        if script.load_error is not None:
            self.send(number, Failed(script.load_error, script.loses_model))
        else:
            loaded = self._loaded = model_loaded(command.params, script.warnings, script.fallbacks)
            is_new = isinstance(command, Load)
            self.send(number, loaded if is_new else ModelResplit(loaded, n_tokens=20))

    def _generate(self, number: int) -> None:
        script, n_done = self.script, 0
        for event in script.extra:
            self.send(number, event)
        for start in range(0, len(script.answer), script.chunk):
            self.send(number, TokenText(script.answer[start : start + script.chunk], (start,)))
            n_done += 1
            if self._pause(number, n_done):
                self.send(number, _finished("cancelled", n_done))
                return
        if script.answer_error is not None:
            self.send(number, Failed(script.answer_error, script.loses_model))
        else:
            self.send(number, _finished(script.reason, n_done))

    def _pause(self, number: int, n_done: int) -> bool:
        """Wait as the script says, and return whether the command was cancelled."""
        with self._changed:
            holds = self.script.hold and n_done >= self.script.hold_after
            timeout = None if holds else self.script.pause_s
            if timeout is None or timeout > 0:
                self._changed.wait_for(lambda: number <= self._cancelled_up_to, timeout)
            return number <= self._cancelled_up_to


def _counted(command: CountTokens) -> TokensCounted:
    """Count words, and three tokens around each message."""
    n_draft = len(command.draft.split())
    if command.messages is None:
        return TokensCounted(None, n_draft)
    return TokensCounted(sum(3 + len(m.content.split()) for m in command.messages), n_draft)


def _finished(reason: str, n_tokens: int) -> Finished:
    usage = Usage(prompt_tokens=20, cached_tokens=0, completion_tokens=n_tokens)
    timings = Timings(0.1, 1.0, 0.31, 200.0, 61.8)
    return Finished(reason, usage, timings)  # type: ignore[arg-type]
