"""The panels near the split panel: tensor map, links, server, saved plans, split search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

import engine
from app.cli.load_options import command_for
from app.core.engine_client import EngineClient
from app.core.translation import tr
from app.devices.split.figures import SplitPicture
from app.devices.split.saved_plans import PlanMenu, PlansPresenter
from app.devices.split.session import SplitSession
from app.server.page.session import ServerSession
from app.widgets.buttons import button
from app.widgets.controls import LateWidget
from app.widgets.text import set_tip
from engine import DeviceInfo, Finished, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from app.devices.interconnect.interconnect_presenter import InterconnectPresenter
    from app.devices.interconnect.views.interconnect_panel import InterconnectPanel
    from app.devices.map.map_presenter import PlacementPresenter
    from app.devices.map.views.panel import PlacementPanel
    from app.devices.tune.tune_presenter import TunePresenter
    from app.server.page.server_panel import ServerPanel
    from app.server.page.server_presenter import ServerPresenter
    from engine import Prediction, Rig, Wires


class SidePanels(QObject):
    """The panels near the split panel, with their presenters.

    Args:
        over: parent of the search dialog.

    Attributes:
        map_place, links_place, server_place: dock contents, created when first visible.
        plans: menu for the split panel's title bar.
        find: button that opens the search, for the bottom of the split panel.
    """

    noticed = Signal(object)  # Notice
    machines_requested = Signal()

    def __init__(
        self, split: SplitSession, client: EngineClient, over: QWidget, serving: ServerSession,
        parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._split = split
        self.plans = PlanMenu()
        self.map_place = LateWidget(self._make_map)
        self.links_place = LateWidget(self._make_links)
        self.server_place = LateWidget(self._make_server)
        self._serving = serving
        self._server: ServerPresenter | None = None
        self._placement: PlacementPresenter | None = None
        self._links: InterconnectPresenter | None = None
        self._picture: SplitPicture | None = None
        self._shown_devices: tuple[Sequence[DeviceInfo], Rig | None, Wires | None] = (
            (), None, None,
        )  # fmt: skip
        self._devices: list[DeviceInfo] | None = None  # this machine's devices, once known
        self._plans = PlansPresenter(
            self.plans, split, command_for, self, devices=self._real_devices
        )
        self.find = button(tr("Find best split…"))
        set_tip(self.find, tr("Measure different splits and find the fastest"))
        self._client, self._over = client, over
        self._applies = self._is_simulated = self._lacks_engine = False
        self._search: TunePresenter | None = None
        self.find.clicked.connect(lambda: self.search.open())
        self._plans.noticed.connect(self.noticed)
        split.pictured.connect(self._on_picture)

    @property
    def search(self) -> TunePresenter:
        """The search for the best split, created on first use."""
        if self._search is None:
            from app.devices.tune.tune_presenter import TunePresenter  # late: its graph is slow
            from app.devices.tune.views.tune_dialog import TuneDialog

            self._search = TunePresenter(TuneDialog(self._over), self._split, self._client, self)
            self._search.choosing.connect(self._apply_next)
        return self._search

    @property
    def placement(self) -> PlacementPanel:
        """The tensor map."""
        return self.map_place.content

    @property
    def links(self) -> InterconnectPanel:
        """The links between devices."""
        return self.links_place.content

    @property
    def server(self) -> ServerPanel:
        """The server panel."""
        return self.server_place.content

    def _make_map(self) -> PlacementPanel:
        from app.devices.map.map_presenter import PlacementPresenter
        from app.devices.map.views.panel import PlacementPanel

        panel = PlacementPanel()
        self._placement = PlacementPresenter(panel, self._split, self)
        if self._picture is not None:
            self._placement.set_picture(self._picture)
        return panel

    def _make_links(self) -> InterconnectPanel:
        from app.devices.interconnect.interconnect_presenter import InterconnectPresenter
        from app.devices.interconnect.views.interconnect_panel import InterconnectPanel

        panel = InterconnectPanel()
        self._links = InterconnectPresenter(panel, self)
        self._links.measured.connect(self._split.read_speeds)
        panel.machines_requested.connect(self.machines_requested)
        self._links.set_devices(*self._shown_devices)
        self._links.lacks_engine = self._lacks_engine
        if self._picture is not None:
            panel.set_token(_token_time(self._picture))
        return panel

    def _make_server(self) -> ServerPanel:
        from app.server.page.server_panel import ServerPanel
        from app.server.page.server_presenter import ServerPresenter

        panel = ServerPanel()
        self._server = ServerPresenter(self._serving, panel, self._client, self)
        return panel

    def set_devices(
        self, devices: Sequence[DeviceInfo], rig: Rig | None = None, wires: Wires | None = None
    ) -> None:
        """Show devices and links to other machines; they are simulated if there is a `rig`."""
        self._shown_devices = devices, rig, wires
        if self._links is not None:
            self._links.set_devices(devices, rig, wires)
        self._devices = list(devices) if rig is None else None
        self._is_simulated = rig is not None

    def _real_devices(self) -> list[DeviceInfo]:
        return engine.list_devices(wait=False) if self._devices is None else self._devices

    @Slot(object)
    def set_model(self, info: ModelInfo) -> None:
        """Show the plans for the selected model."""
        self._plans.set_model(info)

    def note_answer(self, finished: Finished, loaded: ModelLoaded | None) -> None:
        """Save an answer's speed with the loaded plan."""
        self._plans.note_answer(finished, loaded)

    @Slot(bool)
    def set_engine_missing(self, is_missing: bool) -> None:
        """Disable measurements while the engine is missing."""
        self._lacks_engine = is_missing
        if self._links is not None:
            self._links.lacks_engine = is_missing
        self._allow_search()

    def _allow_search(self) -> None:
        has_plan = self._picture is not None and self._picture.plan is not None
        self.find.setEnabled(has_plan and not self._is_simulated and not self._lacks_engine)

    def close(self) -> None:
        """Stop all threads."""
        for presenter in (
            self._placement, self._links, self._server, self._plans, self._search,
        ):  # fmt: skip
            if presenter is not None:
                presenter.close()

    @Slot()
    def _apply_next(self) -> None:
        self._applies = True

    @Slot(object)
    def _on_picture(self, picture: SplitPicture) -> None:
        self._picture = picture
        if self._placement is not None:
            self._placement.set_picture(picture)
        if self._links is not None:
            self.links.set_token(_token_time(picture))
        self._plans.show_current()
        self._allow_search()
        if self._applies:
            self._applies = False
            self._split.request_load()


def _token_time(picture: SplitPicture) -> Prediction | None:
    forecast = picture.speed.forecast
    return forecast.decode if forecast else None
