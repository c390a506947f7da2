"""Commands for the engine and events from it: frozen, picklable, free of torch and Qt.

A host replies to every command with any number of progress events and exactly one closing event:

    Load      LoadProgress*                       ModelLoaded | Failed
    Unload                                        ModelUnloaded | Failed
    Resplit   LoadProgress*                       ModelResplit | Failed
    AnswerRequest  PrefillProgress* ContextShifted* TokenText*   Finished | Failed
    SaveState StateProgress*                      StateSaved | Failed
    LoadState StateProgress*                      StateLoaded | Failed
    Tune      TuneStarted TuneProgress*           Tuned | Failed
    CountTokens                                   TokensCounted | Failed
    Tokenize                                      Tokenized | Failed
    Detokenize                                    Detokenized | Failed
    ApplyTemplate                                 TemplateApplied | Failed
    Embed                                         Embedded | Failed
    ScoreTokens                                   TokensScored | Failed
    CountCache                                    CacheCounted | Failed

At regular intervals, a token of an answer also has a `TokenTimes`, before its text. Any command may
have a `FallbacksChanged` right before or after its closing event.

Commands start in order. Several `AnswerRequest` run concurrently, and their events interleave.
`Resplit`, `SaveState`, `LoadState` and questions (`generation.requests`; the last entries in this
table) run between two tokens while answers continue. `Load`, `Unload` and `Tune` wait until all
answers have finished, and later commands wait for them. If the cache has no room for all answers,
the newest ones pause until it does.

`HostEvent.command_id` is the id with which the command was submitted, so that a receiver can ignore
events from a command it has dropped. A cancelled load or question ends in `Failed(Cancelled)`; a
cancelled generation ends in `Finished("cancelled")`, because the text so far is worth keeping, and
a cancelled search in `Tuned` with the result so far.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.errors import EngineError
from engine.generation.requests import AnswerRequest, Question, Reply
from engine.generation.results import (
    Finished,
    GenerationEvent,
    StateLoaded,
    StateSaved,
    TokenLogprob,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from engine.hardware.fallbacks import Fallback
from engine.load_params import SPLIT_MODES, LoadParams
from engine.model.architectures.description import ModelInfo
from engine.planning.memory import DeviceMemory
from engine.planning.speed.facts import WireSpeed
from engine.util.progress import LoadProgress, StateProgress

if TYPE_CHECKING:
    from engine.planning.search.estimate import TuneEstimate
    from engine.planning.search.results import Trial, TuneResult
    from engine.vision.images.placed import VisionInfo


@dataclass(frozen=True, slots=True)
class EngineReady:
    """First event from a host, with command id 0; importing torch took `seconds`."""

    torch_version: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WiresMeasured:
    """Event from a host on several machines, with command id 0: machine names and links."""

    names: tuple[str, ...]
    wires: tuple[WireSpeed, ...]


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Closing event of a `Load`, with a description of the loaded model.

    Attributes:
        n_ctx: context size in tokens.
        warnings: sentences to show, for example about a missing chat template.
        fallbacks: fallbacks that make GPUs slower; `FallbacksChanged` replaces them.
        model_hash: hash of the file's contents, independent of its name; a saved conversation state
            fits only a model with the same hash.
        n_batch: maximum number of prompt tokens per pass; 0 if unknown.
        vision: image sizes and limits; None if the model cannot see, or if that is unknown.
    """

    info: ModelInfo
    params: LoadParams
    n_ctx: int
    memory: tuple[DeviceMemory, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    model_hash: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    n_batch: int = 0
    vision: VisionInfo | None = None


@dataclass(frozen=True, slots=True)
class FallbacksChanged:
    """The loaded model's fallbacks from now on; empty if its GPUs run at full speed."""

    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True, slots=True)
class ModelResplit:
    """Closing event of a `Resplit`: the model has another split and the same cached tokens.

    Attributes:
        model: description of the model; its `seconds` is the duration of the re-split.
        n_tokens: number of tokens in the cache.
    """

    model: ModelLoaded
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """Closing event of an `Unload`: no model is loaded."""


@dataclass(frozen=True, slots=True)
class TuneStarted:
    """First event of a `Tune`, with an estimate of the search."""

    estimate: TuneEstimate


@dataclass(frozen=True, slots=True)
class TuneProgress:
    """Progress of a search for the best split, after each trial.

    Attributes:
        n_done: number of finished trials, including repetitions.
        n_trials: approximate total number of trials.
        trial: latest trial; a repeated trial is sent again, with all its measurements.
        best: best trial so far; None until a trial has succeeded.
    """

    n_done: int
    n_trials: int
    trial: Trial
    best: Trial | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """Closing event of a `Tune`.

    Attributes:
        model: the previously loaded model, if any, loaded again with the same cached tokens.
    """

    result: TuneResult
    model: ModelLoaded | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Closing event of a command that failed with an error the user can act on.

    Attributes:
        is_model_lost: whether the previously loaded model is gone, because it was freed for a load
            or re-split that failed and could not be restored, or because one of its devices does
            not respond.
    """

    error: EngineError
    is_model_lost: bool = False


Event = (
    EngineReady
    | WiresMeasured
    | LoadProgress
    | ModelLoaded
    | ModelResplit
    | ModelUnloaded
    | FallbacksChanged
    | StateProgress
    | StateSaved
    | StateLoaded
    | TuneStarted
    | TuneProgress
    | Tuned
    | Reply
    | GenerationEvent
    | Failed
)


new_command_id = itertools.count(1).__next__
"""Return the id of a new command, unique in this process; all hosts and processes keep it."""


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event, with the id of the command that it replies to, or 0."""

    command_id: int
    event: Event


@dataclass(frozen=True, slots=True)
class Load:
    """Command to load a model; a loaded one is replaced, but kept if the new one fails."""

    params: LoadParams


@dataclass(frozen=True, slots=True)
class Unload:
    """Command to free the model."""


@dataclass(frozen=True, slots=True)
class Resplit:
    """Command to re-split the loaded model; `params` differ only in the split.

    The conversation continues from the same cached bits, but the new split rounds sums differently.
    If it fails, the old split stays; see `Failed.is_model_lost`.
    """

    params: LoadParams


@dataclass(frozen=True, slots=True)
class SaveState:
    """Command to save the cached part of a conversation to a file.

    An earlier file is either replaced as a whole or kept, for example if it has more of the
    conversation than the cache; `StateSaved` then describes that file.

    Attributes:
        of: command id of the `AnswerRequest` whose prompt and answer to save; 0 for the one that
            was computed last. Saving fails if many others have finished since.
    """

    path: str
    of: int = 0


@dataclass(frozen=True, slots=True)
class LoadState:
    """Command to load a saved conversation into the cache; if that fails, nothing changes."""

    path: str


@dataclass(frozen=True, slots=True)
class Tune:
    """Command to search for the fastest split by measuring; see `engine.hosts.tuning.tune`.

    A loaded model makes room for the search, and is loaded again afterwards as it was.
    """

    params: LoadParams
    goal: str = "chat"
    budget_s: float | None = None
    modes: tuple[str, ...] = SPLIT_MODES
    with_drafts: bool = False


Command = Load | Resplit | AnswerRequest | SaveState | LoadState | Tune | Unload | Question


def model_after(event: object, before: ModelLoaded | None) -> ModelLoaded | None:
    """Return the model that is loaded after an event, given the one loaded before, if any."""
    if isinstance(event, ModelLoaded):
        return event
    if isinstance(event, ModelResplit | Tuned):
        return event.model
    is_lost = isinstance(event, Failed) and event.is_model_lost
    return None if is_lost or isinstance(event, ModelUnloaded) else before


BlockKind = Literal["text", "thought", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """A block of an answer so far: text, thinking, or a tool call.

    Attributes:
        index, id, name: index of a call in its answer, its id, and the name of the function.
        pieces: parts of its text, or of a call's arguments, in order.
        is_whole: whether it is complete; a call that was cut off must not be run.
    """

    kind: BlockKind
    index: int = 0
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False

    @property
    def text(self) -> str:
        """The text, or a call's arguments."""
        return "".join(self.pieces)


BlockChange = tuple[Literal["begun", "grown", "ended"], AnswerBlock, str]
"""A change to a block, with the text that was added."""


class AnswerBlocks:
    """The blocks of an answer, built from its events; only the last one may be open.

    Attributes:
        blocks: all blocks in order.
        logprobs: log probabilities of the tokens, if requested.
        finished: the answer's last event; None until then.
    """

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.logprobs: list[TokenLogprob] = []
        self.finished: Finished | None = None
        self._is_open = False

    def text_of(self, kind: BlockKind) -> str:
        """Return the concatenated text of all blocks of a kind."""
        return "".join([piece for one in self.blocks if one.kind == kind for piece in one.pieces])

    @property
    def calls(self) -> list[AnswerBlock]:
        """All calls so far, complete or not."""
        return [one for one in self.blocks if one.kind == "call"]

    def add(self, event: Event) -> list[BlockChange]:
        """Add an event of the answer and return the resulting changes, in order."""
        if isinstance(event, TokenText):
            self.logprobs += event.logprobs
            return self._write(event) if event.text else []
        if isinstance(event, ToolCallBegun):
            return self._open(AnswerBlock("call", event.index, event.id, event.name))
        if isinstance(event, ToolCallText):
            return self._grow(event.text)
        if isinstance(event, ToolCallEnded):
            return self._close(is_whole=event.is_whole)
        if isinstance(event, Finished):
            self.finished = event
            is_call = self._is_open and self.blocks[-1].kind == "call"
            return self._close(is_whole=event.reason == "stop" and not is_call)
        return []

    def _write(self, event: TokenText) -> list[BlockChange]:
        kind: BlockKind = "thought" if event.part == "reasoning" else "text"
        if self._is_open and self.blocks[-1].kind == kind:
            return self._grow(event.text)
        return [*self._open(AnswerBlock(kind)), *self._grow(event.text)]

    def _open(self, block: AnswerBlock) -> list[BlockChange]:
        changes = self._close(is_whole=True)
        self.blocks.append(block)
        self._is_open = True
        return [*changes, ("begun", block, "")]

    def _grow(self, text: str) -> list[BlockChange]:
        block = self.blocks[-1]
        block.pieces.append(text)
        return [("grown", block, text)]

    def _close(self, *, is_whole: bool) -> list[BlockChange]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self.blocks[-1]
        block.is_whole = is_whole
        return [("ended", block, "")]
