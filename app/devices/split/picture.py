"""Everything that the split panel shows at a moment, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from app.devices.split.figures import RowFigures
from app.devices.split.settings import SplitSettings
from engine import ModelLoaded

if TYPE_CHECKING:
    from engine import Forecast, Plan, Remedy

LoadState = Literal["empty", "ready", "loading", "loaded", "applying"]
"""State of the model in the engine; "applying": a new split is applied to the loaded model."""


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """Predicted and measured speed of the split.

    Attributes:
        forecast: predicted speed; None where it cannot be predicted.
        n_past: context of the decode forecast, in tokens.
        is_measured: whether the forecast comes from measurements of these devices.
        is_simulated: whether the devices are simulated.
        measured: speed of the last answer with this split, in tokens per second; 0 for none.
        expected: predicted speed of that answer, times what guesses gained in it, in tokens per
            second; 0 for none.
    """

    forecast: Forecast | None = None
    n_past: int = 0
    is_measured: bool = False
    is_simulated: bool = False
    measured: float = 0.0
    expected: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative error of the prediction for the last answer; above 0 it was too high."""
        if not self.measured or not self.expected:
            return None
        return self.expected / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class FitFigures:
    """The longest context that fits, and remedies.

    Attributes:
        n_ctx: longest context that fits, in tokens; None while it is unknown.
        remedies: changes that make the settings fit, where they do not.
        is_current: whether both are for the present settings; if not, new ones are on the way.
    """

    n_ctx: int | None = None
    remedies: Sequence[Remedy] = ()
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class SplitPicture:
    """Settings and the figures that follow from them.

    Attributes:
        load_state: state of the model in the engine.
        loaded: the model that is loaded; None if there is none.
        has_model: whether a model is selected, loaded or not.
        rows: figures of the ranks that are shown.
        colours: index of the device colour of every rank, shown or not.
        plan: bytes on each device; None where no plan can be made.
        problems: sentences on why no plan can be made, or where it does not fit.
        n_ctx: context in effect, in tokens.
        measured: measured bytes by rank index; empty while the settings are not the loaded ones.
        can_load: whether there is a model that can be loaded with the settings.
        has_changed: whether the settings differ from the loaded ones.
        can_apply: whether a loaded model can change to the settings without a reload.
        elsewhere: name of the server that computes the model in use; "" where this machine does.
        chosen_because: sentence on why these settings were suggested; "" if the person chose them.
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
    elsewhere: str = ""

    @property
    def can_start(self) -> bool:
        """Whether these settings can be loaded or applied now."""
        if self.load_state == "loaded":
            return self.has_changed and self.can_load
        return self.load_state == "ready" and self.can_load
