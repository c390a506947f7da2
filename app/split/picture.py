"""All that the split panel shows at a moment, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.split.figures import RowFigures
from app.split.settings import SplitSettings
from engine import Forecast, ModelLoaded, Plan, Remedy

LoadState = Literal["empty", "ready", "loading", "loaded", "applying"]
"""What the engine does with the model; "applying" is that it is being split anew."""


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """How fast the split is.

    Attributes:
        forecast: None where no speed can be predicted.
        n_past: tokens in the context that the forecast of decoding is for.
        is_measured: the forecast comes from what was measured on these devices.
        is_simulated: the devices are not here.
        measured: tokens per second of the last answer, 0 for none; of this very split.
        expected: what was predicted for that answer, in tokens per second; 0 for nothing.
    """

    forecast: Forecast | None = None
    n_past: int = 0
    is_measured: bool = False
    is_simulated: bool = False
    measured: float = 0.0
    expected: float = 0.0

    @property
    def error(self) -> float | None:
        """By which part the prediction for the measured answer was too high."""
        if not self.measured or not self.expected:
            return None
        return self.expected / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class FitFigures:
    """What fits.

    Attributes:
        n_ctx: the longest context that fits; None while that is not known.
        remedies: what to do where the settings do not fit.
        is_current: they are for these very settings; others are being looked for.
    """

    n_ctx: int | None = None
    remedies: Sequence[Remedy] = ()
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class SplitPicture:
    """What follows from settings and from what is known.

    Attributes:
        loaded: the model that answers; None where none does.
        has_model: whether a model is selected, loaded or not.
        colours: index of the device colour of every rank, shown or not.
        problems: sentences: no plan can be made, or it does not fit.
        n_ctx: context in effect.
        measured: bytes by rank index, while the settings are those that are loaded.
        has_changed: whether the settings differ from those that are loaded.
        can_apply: whether they differ only in what a loaded model can change.
        chosen_because: why there are these settings, where nobody chose them.
    """

    load_state: LoadState
    loaded: ModelLoaded | None
    has_model: bool
    settings: SplitSettings
    rows: tuple[RowFigures, ...]
    colours: tuple[int, ...]
    plan: Plan | None
    problems: tuple[str, ...]
    n_ctx: int
    measured: Mapping[int, int]
    can_load: bool
    has_changed: bool
    can_apply: bool
    can_undo: bool
    can_redo: bool
    speed: SpeedFigures = field(default_factory=SpeedFigures)
    fit: FitFigures = field(default_factory=FitFigures)
    chosen_because: str = ""

    @property
    def can_start(self) -> bool:
        """Whether these settings can be loaded or applied now."""
        if self.load_state == "loaded":
            return self.has_changed and self.can_load
        return self.load_state == "ready" and self.can_load
