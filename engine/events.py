"""What leaves the engine, and what goes in: frozen, picklable, free of torch and Qt.

A host answers every command with any number of progress events and exactly one closing event:

    Load      LoadProgress*                       ModelLoaded | Failed
    Unload                                        ModelUnloaded | Failed
    Resplit   LoadProgress*                       ModelResplit | Failed
    Generate  PrefillProgress* ContextShifted* TokenText*   Finished | Failed
    SaveState StateProgress*                      StateSaved | Failed
    LoadState StateProgress*                      StateLoaded | Failed
    Tune      TuneStarted TuneProgress*           Tuned | Failed

One token in several of a `Generate` also has a `TokenTimes`, before its text.

Commands are done one after another, but a `Resplit` that is next in line is done in the middle of a
`Generate`, between two tokens: its events come among those of the answer, which then goes on.

`HostEvent.generation` is the number that `EngineHost.submit` returned, so that a receiver can drop
what belongs to a command it no longer cares about. A cancelled load ends in `Failed(Cancelled)`;
a cancelled generation ends in `Finished("cancelled")`, because the text so far is worth keeping,
and a cancelled search in `Tuned` with what it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import SPLIT_MODES, LoadParams, SamplingParams
from engine.errors import EngineError
from engine.generation.results import GenerationEvent
from engine.models.info import ModelInfo
from engine.planning.memory import DeviceMemory
from engine.progress import LoadProgress, StateProgress
from engine.text.messages import ChatMessage

if TYPE_CHECKING:
    from engine.planning.search.estimate import TuneEstimate
    from engine.planning.search.results import Trial, TuneResult

TIMED_EVERY = 16
"""Tokens of which one is timed, unless somebody asks for another number."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine thread has imported what it needs; sent once, with generation 0."""

    torch_version: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The model answers from now on.

    Attributes:
        memory: one entry per rank, in rank order.
        warnings: sentences a person should see, such as a missing chat template.
        model_hash: the same for the same contents under another name; what was saved of a
            conversation fits only that.
    """

    info: ModelInfo
    params: LoadParams
    n_ctx: int
    memory: tuple[DeviceMemory, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    model_hash: str = ""


@dataclass(frozen=True, slots=True)
class ModelResplit:
    """The model answers from other devices or shares, with all that it had in its cache.

    Attributes:
        model: what is loaded now; `seconds` are those of the re-split.
        n_tokens: in the cache.
    """

    model: ModelLoaded
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The state of the first `n_tokens` tokens is in a file of `n_bytes`."""

    path: str
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The cache holds these tokens: an answer to what begins with them computes only the rest."""

    path: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """No model is loaded any more."""


@dataclass(frozen=True, slots=True)
class TuneStarted:
    """What a search for the best split is going to do."""

    estimate: TuneEstimate


@dataclass(frozen=True, slots=True)
class TuneProgress:
    """How far a search is.

    Attributes:
        n_done: trials so far, repetitions included.
        n_trials: in all, about.
        trial: the latest one; one that was repeated comes again, with all that was measured.
        best: the best so far; None while nothing could run.
    """

    n_done: int
    n_trials: int
    trial: Trial
    best: Trial | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """A search has ended.

    `model` is what was loaded before and is again, with what was in its cache; None if nothing was.
    """

    result: TuneResult
    model: ModelLoaded | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A command ended in an error that a person can act on.

    `is_model_lost`: the model that was loaded before is gone: it made room for another or for a
    new split in vain, and could not be brought back; or one of its devices does not answer.
    """

    error: EngineError
    is_model_lost: bool = False


Event = (
    EngineReady
    | LoadProgress
    | ModelLoaded
    | ModelResplit
    | ModelUnloaded
    | StateProgress
    | StateSaved
    | StateLoaded
    | TuneStarted
    | TuneProgress
    | Tuned
    | GenerationEvent
    | Failed
)


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event and the number of the command that it answers."""

    generation: int
    event: Event


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model; one that is loaded already is replaced, and kept if the new one fails."""

    params: LoadParams


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer `messages` through the chat template, or complete `prompt` as it stands.

    With `continue_last` the last message is the assistant's and is written on. Of one token in
    `timed_every` it is told where its time went; of none where that is 0.
    """

    messages: tuple[ChatMessage, ...] = ()
    prompt: str | None = None
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 frozen, so one shared default is safe
    continue_last: bool = False
    timed_every: int = TIMED_EVERY


@dataclass(frozen=True, slots=True)
class Unload:
    """Free the model."""


@dataclass(frozen=True, slots=True)
class Resplit:
    """Split the loaded model as `params` say, which differ from its own in nothing else.

    The conversation goes on. If it fails, the old split stays; see `Failed.is_model_lost`.
    """

    params: LoadParams


@dataclass(frozen=True, slots=True)
class SaveState:
    """Save what is in the cache; an earlier file of that name is replaced as a whole or not."""

    path: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Bring back what was saved, in place of what is in the cache, or fail and change nothing."""

    path: str


@dataclass(frozen=True, slots=True)
class Tune:
    """Search for the fastest split by measuring; see `engine.tuning.tune`.

    What is loaded makes room for it, and is loaded again afterwards as it was.
    """

    params: LoadParams
    goal: str = "chat"
    budget_s: float | None = None
    modes: tuple[str, ...] = SPLIT_MODES


Command = Load | Resplit | Generate | SaveState | LoadState | Tune | Unload
