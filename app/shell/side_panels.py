"""Panels beside the split panel: the map of tensors, links, saved plans, the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

import engine
from app.cli.command import command_for
from app.engine_client import EngineClient
from app.links.presenter import LinksPresenter
from app.links.views.links_panel import LinksPanel
from app.placement.presenter import PlacementPresenter
from app.placement.views.placement_panel import PlacementPanel
from app.plans.presenter import PlansPresenter
from app.plans.views.plan_menu import PlanMenu
from app.split.picture import SplitPicture
from app.split.session import SplitSession
from app.translation import tr
from app.widgets.buttons import button
from app.widgets.text import set_tip
from engine import DeviceInfo, Finished, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from app.tune.presenter import TunePresenter
    from engine import Rig


class SidePanels(QObject):
    """The widgets beside the split panel, with their presenters.

    Args:
        split: session of the split, which all of them show or change.
        over: parent of the dialog of the search.

    Attributes:
        placement, links: panels for docks of their own.
        plans: menu for the title of the split panel.
        find: button that opens the search, for the foot of the split panel.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self, split: SplitSession, client: EngineClient, over: QWidget, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._split = split
        self.placement, self.links, self.plans = PlacementPanel(), LinksPanel(), PlanMenu()
        self._placement = PlacementPresenter(self.placement, split, self)
        self._links = LinksPresenter(self.links, self)
        self._devices: list[DeviceInfo] | None = None  # of this machine, once they are known
        self._plans = PlansPresenter(
            self.plans, split, command_for, self, devices=self._real_devices
        )
        self.find = button(tr("Find best split…"))
        set_tip(self.find, tr("Measure different splits and find the fastest"))
        self._client, self._over = client, over
        self._applies = self._is_simulated = False
        self._search: TunePresenter | None = None
        self.find.clicked.connect(lambda: self.search.open())
        self._plans.noticed.connect(self.noticed)
        self._links.measured.connect(split.read_speeds)
        split.pictured.connect(self._on_picture)

    @property
    def search(self) -> TunePresenter:
        """The search for the best split, made when it is first opened."""
        if self._search is None:
            from app.tune.presenter import TunePresenter  # late: its graph takes long to import
            from app.tune.views.tune_dialog import TuneDialog

            self._search = TunePresenter(TuneDialog(self._over), self._split, self._client, self)
            self._search.choosing.connect(self._apply_next)
        return self._search

    def set_devices(self, devices: Sequence[DeviceInfo], rig: Rig | None = None) -> None:
        """Show these devices; with `rig` they are simulated, so that nothing can be measured."""
        self._links.set_devices(devices, rig)
        self._devices = list(devices) if rig is None else None
        self._is_simulated = rig is not None

    def _real_devices(self) -> list[DeviceInfo]:
        """Return this machine's devices, without asking the drivers again where they are shown."""
        return engine.list_devices(wait=False) if self._devices is None else self._devices

    @Slot(object)
    def set_model(self, info: ModelInfo) -> None:
        """Offer the plans of the selected model."""
        self._plans.set_model(info)

    def note_answer(self, finished: Finished, loaded: ModelLoaded | None) -> None:
        """Save the speed of an answer with the plan that is loaded."""
        self._plans.note_answer(finished, loaded)

    def close(self) -> None:
        """End all work on threads."""
        self._placement.close()
        self._links.close()
        self._plans.close()
        if self._search is not None:
            self._search.close()

    @Slot()
    def _apply_next(self) -> None:
        """Load or apply the settings once they are pictured."""
        self._applies = True

    @Slot(object)
    def _on_picture(self, picture: SplitPicture) -> None:
        forecast = picture.speed.forecast
        self._placement.set_picture(picture)
        self.links.set_token(forecast.decode if forecast else None)
        self._plans.show_current()
        self.find.setEnabled(picture.plan is not None and not self._is_simulated)
        if self._applies:
            self._applies = False
            self._split.request_load()
