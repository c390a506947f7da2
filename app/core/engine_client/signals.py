"""What the window is told of the engine, as Qt signals."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal


class EngineSignals(QObject):
    """The signals of the engine's client.

    Those of answers come with their `RunningAnswer` last, as several are written at once.
    """

    ready = Signal(object)  # EngineReady
    state_changed = Signal(object)  # EngineState
    load_progress = Signal(float)  # 0 to 1
    load_doing = Signal(str)  # present step of the load, "" while it only reads the file
    loaded = Signal(object)  # ModelLoaded
    load_failed = Signal(object)  # EngineError; Cancelled when a person stopped it
    resplit_done = Signal(object)  # ModelResplit; `load_progress` is emitted before
    resplit_failed = Signal(object)  # EngineError; the old split is kept unless `model` is None
    state_progress = Signal(float)  # 0 to 1, of the state that is being saved or loaded
    state_saved = Signal(object)  # StateSaved
    state_loaded = Signal(object)  # StateLoaded
    state_failed = Signal(object, object)  # EngineError, the SaveState or LoadState it ended
    tune_started = Signal(object)  # TuneEstimate
    tune_progress = Signal(object)  # TuneProgress
    tuned = Signal(object)  # TuneResult; the model from before the search is loaded again
    tune_failed = Signal(object)  # EngineError; the model is loaded again unless `model` is None
    unloaded = Signal()
    prefill = Signal(int, int, object)  # prompt tokens done, all prompt tokens, RunningAnswer
    shifted = Signal(int, object)  # number of tokens dropped from a full context, RunningAnswer
    text = Signal(str, object)  # text, RunningAnswer
    called = Signal(object, object)  # ToolCallBegun or ToolCallText, RunningAnswer
    paced = Signal(object)  # RunningAnswer whose tokens per second are known anew
    rate = Signal(float, int)  # tokens per second of all answers, and how many; 0 at the end
    token_times = Signal(object)  # TokenTimes of one token in every few
    finished = Signal(object, object)  # Finished, RunningAnswer
    failed = Signal(object, object)  # EngineError that ended an answer, RunningAnswer
    counted = Signal(object)  # TokensCounted; None where they could not be counted
    lost = Signal(object, object)  # EngineError that has ended the loaded model, its ModelLoaded
    fallbacks_changed = Signal(object)  # tuple of Fallback: what makes the GPUs slower from now on
