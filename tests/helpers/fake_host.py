"""An engine host without an engine, which answers commands from a script on its own threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine import (
    GOALS,
    AnswerRequest,
    CacheCounted,
    Cancelled,
    Command,
    CountCache,
    CountTokens,
    DeviceMemory,
    EngineError,
    EngineReady,
    Event,
    Failed,
    Fallback,
    Finished,
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
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Trial,
    Tune,
    Tuned,
    TuneEstimate,
    TuneProgress,
    TuneResult,
    TuneStarted,
    Unload,
    Usage,
    VisionInfo,
    new_command_id,
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
    params: LoadParams, warnings: tuple[str, ...] = (), fallbacks: tuple[Fallback, ...] = (),
    model_hash: str = "", vision: VisionInfo | None = None,
) -> ModelLoaded:  # fmt: skip
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
        model_hash=model_hash,
        vision=vision,
    )


@dataclass
class Script:
    """The script of the events that the next commands lead to.

    Attributes:
        pause_s: pause between two events, in seconds; a cancellation ends it early.
        hold: while set, a command waits for its cancellation after `hold_after` events.
        others: scripts of the answers to particular messages, by their last paragraphs.
        n_at_once: most answers at once; others wait.
        thought: thought in front of the answer, which comes as such.
        calls: names and arguments of the functions that it calls behind its text.
        vision: how the model sees pictures.
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
    model_hash: str = ""
    hold: bool = False
    hold_after: int = 0
    n_load_steps: int = 4
    extra: list[Event] = field(default_factory=list)
    others: dict[str, Script] = field(default_factory=dict)
    n_at_once: int = 16
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    vision: VisionInfo | None = None


class FakeHost:
    """A host with the interface and the order of events of the real one.

    Answers run beside each other, each on a thread; what changes the model waits for their ends.
    """

    def __init__(self, on_event: Callable[[HostEvent], None], script: Script | None = None) -> None:
        self.script = script or Script()
        self.commands: list[Command] = []
        self.counts: list[Command] = []
        self._on_event = on_event
        self._queue: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._changed = threading.Condition()
        self._loaded: ModelLoaded | None = None
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._thread.start()
        self._counting = self._thread  # the last thread that has counted
        self._answers: list[threading.Thread] = []
        self._n_answers = 0

    def submit(self, command: Command, generation: int | None = None) -> int:
        number = new_command_id() if generation is None else generation
        self._open.add(number)
        if isinstance(command, CountTokens):  # in the middle of an answer, too
            self.counts.append(command)
            answer = number, _counted(command)
            self._counting = threading.Thread(target=self.send, args=answer, name="fake-count")
            self._counting.start()
        elif isinstance(command, CountCache):  # as well
            self.send(number, CacheCounted(512, 256))
        else:
            self.commands.append(command)
            self._queue.put((number, command))
        return number

    def cancel(self, generation: int | None = None) -> None:
        with self._changed:
            if generation is None:
                self._cancelled |= self._open
            else:
                self._cancelled.add(generation)
            self._changed.notify_all()

    def let_go(self, *scripts: Script) -> None:
        """Have what these scripts hold go on."""
        with self._changed:
            for script in scripts:
                script.hold = False
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
            if isinstance(command, Load | Tune | Unload):
                self._finish_answers()
            if isinstance(command, Load):
                self._load(number, command)
            elif isinstance(command, AnswerRequest):
                thread = threading.Thread(
                    target=self._generate, args=(number, command), name="fake-answer"
                )
                self._answers.append(thread)
                thread.start()
            elif isinstance(command, Resplit):
                self._load(number, command)
            elif isinstance(command, SaveState | LoadState):
                self._move_state(number, command)
            elif isinstance(command, Tune):
                self._tune(number, command)
            else:
                self._loaded = None
                self.send(number, ModelUnloaded())
        self._finish_answers()

    def _finish_answers(self) -> None:
        for thread in self._answers:
            thread.join()
        self._answers.clear()

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
            loaded = self._loaded = model_loaded(
                command.params, script.warnings, script.fallbacks, script.model_hash, script.vision
            )
            is_new = isinstance(command, Load)
            self.send(number, loaded if is_new else ModelResplit(loaded, n_tokens=20))

    def _generate(self, number: int, command: AnswerRequest) -> None:
        asked = command.messages[-1].content if command.messages else ""
        script = self.script.others.get(asked.rpartition("\n\n")[2], self.script)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_cancelled(number) or self._n_answers < self.script.n_at_once
            )
            self._n_answers += 1
        if self._is_cancelled(number):
            self.send(number, _finished("cancelled", 0))
        else:
            self._write(number, script)
        with self._changed:
            self._n_answers -= 1
            self._changed.notify_all()

    def _write(self, number: int, script: Script) -> None:
        n_done = 0
        for event in script.extra:
            self.send(number, event)
        if script.thought:
            self.send(number, TokenText(script.thought, (0,), "reasoning"))
        for start in range(0, len(script.answer), script.chunk):
            self.send(number, TokenText(script.answer[start : start + script.chunk], (start,)))
            n_done += 1
            if self._pause(number, n_done, script):
                self.send(number, _finished("cancelled", n_done))
                return
        for index, (name, arguments) in enumerate(script.calls):
            self.send(number, TokenText("", (100 + index,)))
            self.send(number, ToolCallBegun(index, f"call{index:05}", name))
            for start in range(0, len(arguments), script.chunk):
                self.send(number, ToolCallText(index, arguments[start : start + script.chunk]))
            is_whole = script.reason == "stop" or index < len(script.calls) - 1
            self.send(number, ToolCallEnded(index, is_whole))
        if script.answer_error is not None:
            self.send(number, Failed(script.answer_error, script.loses_model))
        else:
            self.send(number, _finished(script.reason, n_done))

    def _pause(self, number: int, n_done: int, script: Script | None = None) -> bool:
        """Wait as the script says, and return whether the command was cancelled."""
        script = script or self.script
        with self._changed:
            holds = script.hold and n_done >= script.hold_after
            timeout = None if holds else script.pause_s
            if timeout is None or timeout > 0:
                self._changed.wait_for(
                    lambda: self._is_cancelled(number) or (holds and not script.hold), timeout
                )
            return self._is_cancelled(number)

    def _is_cancelled(self, number: int) -> bool:
        return number in self._cancelled


def _counted(command: CountTokens) -> TokensCounted:
    """Count words, and three tokens around each message."""
    n_draft = len(command.draft.split())
    if command.messages is None:
        return TokensCounted(None, n_draft)
    counts = [(m.role, 3 + len(m.content.split())) for m in command.messages]
    n_kept = sum(n for role, n in counts if role == "system")
    return TokensCounted(sum(n for _, n in counts), n_draft, n_kept)


def _finished(reason: str, n_tokens: int) -> Finished:
    usage = Usage(prompt_tokens=20, cached_tokens=0, completion_tokens=n_tokens)
    timings = Timings(0.1, 1.0, 0.31, 200.0, 61.8)
    return Finished(reason, usage, timings)  # type: ignore[arg-type]
