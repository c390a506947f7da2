"""Modules that the window needs soon after its first picture, imported on a thread.

Together they take longer than everything before it. Whoever needs one sooner waits for it alone.
"""

from __future__ import annotations

from importlib import import_module

import engine
from app.core.process.engine_place import chosen_host


def import_host() -> None:
    """Import what starts the engine."""
    chosen_host()


def import_planner() -> None:
    """Import what shows devices, reads files, plans splits and shows answers."""
    for name in ("DeviceMonitor", "Forecaster", "MachineFile", "Calibration", "read_topology"):
        getattr(engine, name)
    for name in ("read_model_info", "Planner", "choose", "Fit", "PlanStore", "chosen_way"):
        getattr(engine, name)
    engine.supported_architectures()  # imports them all
    import_module("markdown_it")
    import_module("mdit_py_plugins.footnote")
