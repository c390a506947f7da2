"""What stands around the split panel: the map of tensors, the links, the saved plans."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QObject, Signal, Slot

from app.cli.command import command_for
from app.links_presenter import LinksPresenter
from app.placement_presenter import PlacementPresenter
from app.plans_presenter import PlansPresenter
from app.split_loads import is_same_load
from app.split_picture import SplitPicture
from app.views.links_panel import LinksPanel
from app.views.placement_panel import PlacementPanel
from app.views.plan_menu import PlanMenu
from app.views.split_panel import SplitPanel
from engine import DeviceInfo, Finished, ModelInfo, ModelLoaded


class Companions(QObject):
    """The widgets beside one split panel, and what connects them with it."""

    noticed = Signal(object)  # Notice

    def __init__(self, split: SplitPanel, parent: QObject) -> None:
        super().__init__(parent)
        self._split = split
        self.placement, self.links, self.plans = PlacementPanel(), LinksPanel(), PlanMenu()
        self._placement = PlacementPresenter(self.placement, split, self)
        self._links = LinksPresenter(self.links, self)
        self._plans = PlansPresenter(self.plans, split, is_same_load, command_for, self)
        self._plans.noticed.connect(self.noticed)
        self._links.measured.connect(split.read_speeds)
        split.pictured.connect(self._on_picture)

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        self._links.set_devices(devices)

    @Slot(object)
    def set_model(self, info: ModelInfo) -> None:
        """The file that was chosen."""
        self._plans.set_model(info)

    def note_answer(self, finished: Finished, loaded: ModelLoaded | None) -> None:
        self._plans.note_answer(finished, loaded)

    def close(self) -> None:
        """End what goes on beside the window."""
        self._placement.close()
        self._links.close()
        self._plans.close()

    @Slot(object)
    def _on_picture(self, picture: SplitPicture) -> None:
        forecast = picture.speed.forecast
        self._placement.set_picture(picture)
        self.links.set_token(forecast.decode if forecast else None)
        self._plans.show_current()
