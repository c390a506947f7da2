"""What the planner says about a model over the machines that have joined."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import engine  # what plans is resolved when it is used
from app.devices.split.speed import this_machine
from engine import EngineError, LoadParams

if TYPE_CHECKING:
    from engine import JoinedMachine, WiresMeasured


def machine_advice(
    params: LoadParams, machines: Iterable[JoinedMachine], linked: WiresMeasured
) -> str:
    """Return whether a split over machines pays, with the speeds of both ways; "" if unknown.

    Args:
        params: how the model is loaded; devices and split are ignored.
        machines: the other machines.
        linked: measured links between all.
    """
    far = [info for machine in machines for info in machine.far_infos]
    wires = engine.Wires(measured=linked.wires)
    try:
        forecaster = this_machine([*engine.list_devices(), *far], wires).forecaster
        asked = replace(params, machines=(), devices=("cpu",), split=None, groups=None)
        with closing(engine.Planner(params.path)) as planner:
            return engine.choose_machines(planner, asked, forecaster).reason
    except EngineError:
        return ""  # what is wrong is told by the load
