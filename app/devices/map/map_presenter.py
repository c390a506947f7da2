"""Connects the placement map to the split; maps are computed on a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer, Slot

import engine
from app.core.background import LatestJob
from app.core.translation import error_text
from app.devices.map.grid import Part, with_pins
from app.devices.map.views.panel import PinTarget, PlacementPanel
from app.devices.map.views.placement_table import Look
from app.devices.split.figures import SplitPicture, rank_labels
from app.devices.split.session import SplitSession
from app.devices.split.settings import RankSettings, SplitSettings
from engine import EngineError, LoadParams

if TYPE_CHECKING:
    from engine import PlacementMap, Planner

WAIT_MS: Final = 60
"""Delay of a new map in milliseconds, because drags change the split every frame."""


class PlacementPresenter(QObject):
    """Shows the current split's map while the panel is visible; turns pins into overrides."""

    def __init__(
        self,
        panel: PlacementPanel,
        split: SplitSession,
        parent: QObject | None = None,
        *,
        planner_factory: Callable[[str], Planner] = lambda path: engine.Planner(path),
    ) -> None:
        super().__init__(parent)
        self._panel, self._split, self._factory = panel, split, planner_factory
        self._picture: SplitPicture | None = None
        self._requested: LoadParams | None = None
        self._planner: tuple[str, Planner] | None = None  # with its path; used only by the thread
        self._job = LatestJob("tandem-map", self)
        self._job.done.connect(self._show)
        self._job.failed.connect(self._fail)
        self._timer = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._timer.timeout.connect(self._ask)
        panel.shown.connect(self._ask)
        panel.pin_requested.connect(self._pin)
        panel.unpin_requested.connect(lambda parts: self._pin(None, parts))
        panel.unpin_all_requested.connect(lambda: split.set_overrides(()))

    @Slot(object)
    def set_picture(self, picture: SplitPicture) -> None:
        """Show the map for these settings after a short delay."""
        self._picture = picture
        if self._panel.isVisible() and not self._timer.isActive():
            self._timer.start()

    def close(self) -> None:
        """Wait for the thread and close the model file."""
        self._timer.stop()
        self._job.close()
        if self._planner is not None:
            self._planner[1].close()
            self._planner = None

    @Slot()
    def _ask(self) -> None:
        params = self._params()
        if params is None or not params.path:
            self._requested = None
            self._job.drop()
            self._panel.clear()
        elif params != self._requested:
            self._requested = params
            self._job.run(lambda: (params, self._placement(params)))

    def _params(self) -> LoadParams | None:
        try:
            return self._split.load_params()
        except EngineError:
            return None

    def _placement(self, params: LoadParams) -> PlacementMap:
        """Return the map for these load parameters; runs on the thread."""
        opened = self._planner
        if opened is None or opened[0] != params.path:
            if opened is not None:
                self._planner = None
                opened[1].close()
            self._planner = opened = params.path, self._factory(params.path)
        return opened[1].placement(params)

    @Slot(object)
    def _show(self, found: tuple[LoadParams, PlacementMap]) -> None:
        params, placement = found
        picture = self._picture
        if picture is None or params.devices != _devices(picture.settings):
            self._requested = None  # settings with these devices will follow and request it again
            return
        look = look_of(picture, placement.devices)
        self._panel.show_map(placement, params.overrides, look, targets_of(picture))

    @Slot(object)
    def _fail(self, error: EngineError) -> None:
        overrides = self._requested.overrides if self._requested else ()
        self._panel.show_problem(error_text(error), overrides)

    @Slot(object, object)
    def _pin(self, target: str | None, parts: frozenset[Part]) -> None:
        if self._picture is not None:
            overrides = self._picture.settings.overrides
            self._split.set_overrides(with_pins(overrides, parts, target))


def _devices(settings: SplitSettings) -> tuple[str, ...]:
    return tuple(settings.ranks[i].device for i in settings.active)


def look_of(picture: SplitPicture, devices: Sequence[str]) -> Look:
    """Return labels and colours for the active ranks, then for other devices with tensors."""
    settings, colours = picture.settings, picture.colours
    labels = rank_labels([rank.device for rank in settings.ranks])
    others = devices[len(settings.active) :]
    places = [*settings.active, *(_place(settings.ranks, device) for device in others)]
    return Look(tuple(colours[i] for i in places), tuple(labels[i] for i in places))


def _place(ranks: Sequence[RankSettings], device: str) -> int:
    return next((i for i, rank in enumerate(ranks) if rank.device == device), 0)


def targets_of(picture: SplitPicture) -> list[PinTarget]:
    """Return the pin targets: each active rank and each inactive device."""
    settings, colours = picture.settings, picture.colours
    labels = rank_labels([rank.device for rank in settings.ranks])
    in_use = _devices(settings)
    found = [
        PinTarget(device if in_use.count(device) == 1 else f"#{number}", labels[i], colours[i])
        for number, (i, device) in enumerate(zip(settings.active, in_use, strict=True))
    ]
    others = dict.fromkeys(rank.device for rank in settings.ranks if rank.device not in in_use)
    for device in others:
        i = _place(settings.ranks, device)
        found.append(PinTarget(device, labels[i], colours[i]))
    return found
