"""Tandem's engine: one GGUF language model on all devices of a machine.

The names below are the public surface; a front end uses nothing else. They are resolved on first
use, so that `import engine` costs nothing and torch is imported only by what computes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api import Model, load_model
    from engine.benchmark import BenchResult, BenchTest
    from engine.config import (
        KV_TYPES,
        PEER_MODES,
        SPLIT_MODES,
        ControlVector,
        LoadParams,
        PeerMode,
        SamplingParams,
    )
    from engine.devices import (
        DeviceInfo,
        DeviceMonitor,
        DeviceSnapshot,
        GpuPath,
        Link,
        Pcie,
        Topology,
        cuda_status,
        find_gpu_path,
        hidden_gpus,
        list_devices,
        parse_devices,
        parse_target,
        read_topology,
    )
    from engine.errors import (
        Cancelled,
        CommError,
        ContextOverflow,
        DeviceError,
        EngineCrashed,
        EngineError,
        InvalidGGUF,
        MissingShard,
        ModelFileError,
        NoDevice,
        OutOfDeviceMemory,
        PromptError,
        SplitError,
        StateFileError,
        TemplateError,
        UnsupportedArchitecture,
        UnsupportedQuant,
    )
    from engine.events import (
        ChatMessage,
        Command,
        ContextShifted,
        DeviceMemory,
        EngineReady,
        Event,
        Failed,
        Finished,
        Generate,
        HostEvent,
        Load,
        LoadProgress,
        LoadState,
        MemoryUse,
        ModelLoaded,
        ModelResplit,
        ModelUnloaded,
        PrefillProgress,
        Resplit,
        SaveState,
        StateLoaded,
        StateProgress,
        StateSaved,
        Timings,
        TokenText,
        Tune,
        Tuned,
        TuneProgress,
        TuneStarted,
        Unload,
        Usage,
    )
    from engine.host import EngineHost, ThreadHost
    from engine.info import Inspection, ModelInfo, TensorSummary, inspect_model, read_model_info
    from engine.kernel_tuning import KernelTuning, tune_kernels
    from engine.link_proof import prove_links
    from engine.link_speed import LinkSpeed, measure_link
    from engine.machine_speed import DeviceSpeed, measure_device, measure_facts
    from engine.parallel.ways import Way
    from engine.plan import DevicePlan, Plan
    from engine.planning.calibration import Calibration
    from engine.planning.choice import Alternative, Choice, choose
    from engine.planning.evaluator import Evaluation
    from engine.planning.facts import DeviceFacts, LinkFacts, Links
    from engine.planning.fit import Fit, Remedy, Room
    from engine.planning.forecast import Forecast, Forecaster
    from engine.planning.link_records import (
        LinkRecord,
        chosen_way,
        link_problems,
        record_document,
        speed_of,
    )
    from engine.planning.machine_file import MachineFile, known_facts, known_links
    from engine.planning.placement import PlacementMap, TensorPlace
    from engine.planning.planner import Planner
    from engine.planning.plans import (
        AUTO_PLAN,
        DeviceRef,
        ModelKey,
        PlanBadge,
        PlanStore,
        SavedPlan,
        export_plan,
        fastest_plan,
        import_plan,
        model_key,
    )
    from engine.planning.positions import Position, Positions
    from engine.planning.prediction import Prediction, RankTime
    from engine.planning.rigs import SIMULATED, Rig, parse_rig
    from engine.planning.speed import SpeedModel
    from engine.planning.tune_file import TuneFile, last_result, result_document
    from engine.planning.tune_plan import TuneEstimate, TunePlan
    from engine.planning.tuned import GOALS, Goal, Region, Sample, Speeds, Trial, TuneResult
    from engine.scoring import Perplexity, perplexity
    from engine.text import ChatTemplate, load_tokenizer
    from engine.timeline import RankTimes, TokenTimes
    from engine.tuning import tune
    from engine.work import TokenWork, token_work


__all__ = [
    "AUTO_PLAN",
    "GOALS",
    "KV_TYPES",
    "PEER_MODES",
    "SIMULATED",
    "SPLIT_MODES",
    "Alternative",
    "BenchResult",
    "BenchTest",
    "Calibration",
    "Cancelled",
    "ChatMessage",
    "ChatTemplate",
    "Choice",
    "CommError",
    "Command",
    "ContextOverflow",
    "ContextShifted",
    "ControlVector",
    "DeviceError",
    "DeviceFacts",
    "DeviceInfo",
    "DeviceMemory",
    "DeviceMonitor",
    "DevicePlan",
    "DeviceRef",
    "DeviceSnapshot",
    "DeviceSpeed",
    "EngineCrashed",
    "EngineError",
    "EngineHost",
    "EngineReady",
    "Evaluation",
    "Event",
    "Failed",
    "Finished",
    "Fit",
    "Forecast",
    "Forecaster",
    "Generate",
    "Goal",
    "GpuPath",
    "HostEvent",
    "Inspection",
    "InvalidGGUF",
    "KernelTuning",
    "Link",
    "LinkFacts",
    "LinkRecord",
    "LinkSpeed",
    "Links",
    "Load",
    "LoadParams",
    "LoadProgress",
    "LoadState",
    "MachineFile",
    "MemoryUse",
    "MissingShard",
    "Model",
    "ModelFileError",
    "ModelInfo",
    "ModelKey",
    "ModelLoaded",
    "ModelResplit",
    "ModelUnloaded",
    "NoDevice",
    "OutOfDeviceMemory",
    "Pcie",
    "PeerMode",
    "Perplexity",
    "PlacementMap",
    "Plan",
    "PlanBadge",
    "PlanStore",
    "Planner",
    "Position",
    "Positions",
    "Prediction",
    "PrefillProgress",
    "PromptError",
    "RankTime",
    "RankTimes",
    "Region",
    "Remedy",
    "Resplit",
    "Rig",
    "Room",
    "Sample",
    "SamplingParams",
    "SaveState",
    "SavedPlan",
    "SpeedModel",
    "Speeds",
    "SplitError",
    "StateFileError",
    "StateLoaded",
    "StateProgress",
    "StateSaved",
    "TemplateError",
    "TensorPlace",
    "TensorSummary",
    "ThreadHost",
    "Timings",
    "TokenText",
    "TokenTimes",
    "TokenWork",
    "Topology",
    "Trial",
    "Tune",
    "TuneEstimate",
    "TuneFile",
    "TunePlan",
    "TuneProgress",
    "TuneResult",
    "TuneStarted",
    "Tuned",
    "Unload",
    "UnsupportedArchitecture",
    "UnsupportedQuant",
    "Usage",
    "Way",
    "choose",
    "chosen_way",
    "cuda_status",
    "export_plan",
    "fastest_plan",
    "find_gpu_path",
    "hidden_gpus",
    "import_plan",
    "inspect_model",
    "known_facts",
    "known_links",
    "last_result",
    "link_problems",
    "list_devices",
    "load_model",
    "load_tokenizer",
    "measure_device",
    "measure_facts",
    "measure_link",
    "model_key",
    "parse_devices",
    "parse_rig",
    "parse_target",
    "perplexity",
    "prove_links",
    "read_model_info",
    "read_topology",
    "record_document",
    "result_document",
    "speed_of",
    "token_work",
    "tune",
    "tune_kernels",
]

_HOME = {
    "api": ("Model", "load_model"),
    "benchmark": ("BenchResult", "BenchTest"),
    "config": (
        "KV_TYPES", "PEER_MODES", "SPLIT_MODES", "ControlVector", "LoadParams", "PeerMode",
        "SamplingParams",
    ),
    "devices": (
        "DeviceInfo", "DeviceMonitor", "DeviceSnapshot", "GpuPath", "Link", "Pcie", "Topology",
        "cuda_status", "find_gpu_path", "hidden_gpus", "list_devices", "parse_devices",
        "parse_target", "read_topology",
    ),
    "errors": (
        "Cancelled", "CommError", "ContextOverflow", "DeviceError", "EngineCrashed", "EngineError",
        "InvalidGGUF", "MissingShard", "ModelFileError", "NoDevice", "OutOfDeviceMemory",
        "PromptError", "SplitError", "StateFileError", "TemplateError", "UnsupportedArchitecture",
        "UnsupportedQuant",
    ),
    "events": (
        "ChatMessage", "Command", "ContextShifted", "DeviceMemory", "EngineReady", "Event",
        "Failed", "Finished", "Generate", "HostEvent", "Load", "LoadProgress", "LoadState",
        "MemoryUse", "ModelLoaded", "ModelResplit", "ModelUnloaded", "PrefillProgress", "Resplit",
        "SaveState", "StateLoaded", "StateProgress", "StateSaved", "Timings", "TokenText", "Tune",
        "TuneProgress", "TuneStarted", "Tuned", "Unload", "Usage",
    ),
    "host": ("EngineHost", "ThreadHost"),
    "info": ("Inspection", "ModelInfo", "TensorSummary", "inspect_model", "read_model_info"),
    "machine_speed": ("DeviceSpeed", "measure_device", "measure_facts"),
    "scoring": ("Perplexity", "perplexity"),
    "plan": ("DevicePlan", "Plan"),
    "planning.fit": ("Fit", "Remedy", "Room"),
    "planning.positions": ("Position", "Positions"),
    "planning.tune_plan": ("TuneEstimate", "TunePlan"),
    "planning.tuned": ("GOALS", "Goal", "Region", "Sample", "Speeds", "Trial", "TuneResult"),
    "planning.placement": ("PlacementMap", "TensorPlace"),
    "planning.planner": ("Planner",),
    "text": ("ChatTemplate", "load_tokenizer"),
    "timeline": ("RankTimes", "TokenTimes"),
    "work": ("TokenWork", "token_work"),
    "link_proof": ("prove_links",),
    "link_speed": ("LinkSpeed", "measure_link"),
    "parallel.ways": ("Way",),
    "planning.link_records": (
        "LinkRecord", "chosen_way", "link_problems", "record_document", "speed_of",
    ),
    "planning.calibration": ("Calibration",),
    "planning.choice": ("Alternative", "Choice", "choose"),
    "planning.evaluator": ("Evaluation",),
    "planning.facts": ("DeviceFacts", "LinkFacts", "Links"),
    "planning.forecast": ("Forecast", "Forecaster"),
    "planning.machine_file": ("MachineFile", "known_facts", "known_links"),
    "planning.prediction": ("Prediction", "RankTime"),
    "planning.rigs": ("SIMULATED", "Rig", "parse_rig"),
    "planning.speed": ("SpeedModel",),
    "planning.plans": (
        "AUTO_PLAN", "DeviceRef", "ModelKey", "PlanBadge", "PlanStore", "SavedPlan", "export_plan",
        "fastest_plan", "import_plan", "model_key",
    ),
    "planning.tune_file": ("TuneFile", "last_result", "result_document"),
    "tuning": ("tune",),
    "kernel_tuning": ("KernelTuning", "tune_kernels"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    """Import the module that defines `name`, on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    value = getattr(import_module(f"engine.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
