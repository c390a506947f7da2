"""Tandem's engine, which runs one GGUF language model on all devices of a machine.

The names below are the public surface; a front end uses nothing else. They are resolved on first
use, so that `import engine` costs nothing and torch is imported only by what computes.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api import Model, load_model
    from engine.config.grammar import Grammar, GrammarKind, form_of
    from engine.config.kv_types import KV_TYPES, KVTypes, kv_types
    from engine.config.load import (
        DEFAULT_DRAFTED,
        DRAFT_KINDS,
        LEAST_DRAFT_VOCAB,
        MACHINE_LINKS,
        MMPROJ_KINDS,
        MOST_DRAFTED,
        PEER_MODES,
        ROPE_SCALINGS,
        SPLIT_MODES,
        ControlVector,
        DraftKind,
        LoadParams,
        MachineLink,
        PeerMode,
    )
    from engine.config.sampling import SAMPLERS, SamplingParams
    from engine.constraints.checker import check_grammar
    from engine.devices.builds import TorchKind, suitable_torch
    from engine.devices.catalog import cuda_status, hidden_gpus, list_devices
    from engine.devices.links import Link, Pcie, Topology, read_topology
    from engine.devices.monitor import DeviceMonitor
    from engine.devices.places import far_id, is_cpu, local_id, machine_of
    from engine.devices.routes import Way
    from engine.devices.selection import parse_devices, parse_target
    from engine.devices.types import ClockLimit, DeviceInfo, DeviceSnapshot
    from engine.errors import (
        Cancelled,
        CommError,
        ContextOverflow,
        DeviceError,
        EngineCrashed,
        EngineError,
        EngineMissing,
        GrammarError,
        InvalidGGUF,
        MachineLost,
        MissingShard,
        ModelBusy,
        ModelFileError,
        NoDevice,
        OutOfDeviceMemory,
        PictureError,
        PromptError,
        SplitError,
        StateFileError,
        TemplateError,
        ToolError,
        UnsupportedArchitecture,
        UnsupportedQuant,
    )
    from engine.events import (
        Command,
        EngineReady,
        Event,
        Failed,
        FallbacksChanged,
        Generate,
        HostEvent,
        Load,
        LoadState,
        ModelLoaded,
        ModelResplit,
        ModelUnloaded,
        Resplit,
        SaveState,
        Tune,
        Tuned,
        TuneProgress,
        TuneStarted,
        Unload,
        WiresMeasured,
        model_after,
    )
    from engine.files import (
        atomic_write,
        exposure,
        has_ended,
        make_private,
        process_mark,
        read_file,
        sweep_temporaries,
        tandem_folder,
        temporary_folder,
    )
    from engine.generation.parts.thought_text import thought_apart
    from engine.generation.results import (
        AnswerPart,
        ContextShifted,
        Finished,
        FinishReason,
        PrefillProgress,
        StateLoaded,
        StateSaved,
        Timings,
        TokenLogprob,
        TokenText,
        ToolCallBegun,
        ToolCallEnded,
        ToolCallText,
        Usage,
        join_texts,
    )
    from engine.generation.scoring import Perplexity, perplexity
    from engine.gguf.header import is_header_whole
    from engine.gpu.matmul.tuning_report import KernelTuning
    from engine.hardware.card_records import card_problems
    from engine.hardware.fallbacks import Fallback, FallbackKind
    from engine.hardware.garbage import collect_garbage
    from engine.hardware.gpu_path import GpuPath, find_gpu_path
    from engine.hardware.trial_process import TrialProcess
    from engine.harmless import error_line, json_escaped, one_line, printable
    from engine.host import EngineHost, ThreadHost
    from engine.inquiries.questions import (
        ApplyTemplate,
        CacheCounted,
        CountCache,
        CountTokens,
        Detokenize,
        Detokenized,
        Embed,
        Embedded,
        ScoreTokens,
        TemplateApplied,
        Tokenize,
        Tokenized,
        TokensCounted,
        TokensScored,
    )
    from engine.json_file import replace_json
    from engine.limited.answering import answer_lines, ending_after
    from engine.limited.child import ChildEnded, LimitedChild
    from engine.links.proof import prove_links
    from engine.machines.gathering import Gathering, JoinedMachine
    from engine.machines.interfaces import (
        default_address,
        listen_for_machines,
        own_addresses,
        parse_address,
    )
    from engine.machines.joining import JoinRequest, join_machines
    from engine.machines.lines import check_token
    from engine.machines.machines_host import MachinesHost
    from engine.measuring.benchmark import BenchResult, BenchTest
    from engine.measuring.kernel_tuning import tune_kernels
    from engine.measuring.link_speed import LinkSpeed, measure_link
    from engine.measuring.machine_speed import DeviceSpeed, measure_device, measure_facts
    from engine.measuring.product_speed import ProductSpeed, measure_products, product_types
    from engine.models.description import Inspection, ModelInfo, TensorSummary
    from engine.models.info import inspect_model, read_model_info
    from engine.models.registry import supported_architectures
    from engine.pack import delete_pack, leave_pack, make_holdable, pack_folders, use_pack
    from engine.pictures.decoding import UnusablePicture, decode_picture
    from engine.pictures.limits import MOST_PICTURES, MOST_PIXELS
    from engine.pictures.reading import picture_bytes, picture_text
    from engine.pictures.resizing import TooNarrow
    from engine.pictures.sight import PictureSight
    from engine.planning.choice import Choice, choose
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.evaluation.fit import Fit, Remedy, Room
    from engine.planning.evaluation.handle_positions import Position, Positions
    from engine.planning.machines.machine_choice import (
        choose_machines,
        machines_of,
        rank_counts,
    )
    from engine.planning.machines.machine_rigs import parse_rig
    from engine.planning.memory import DeviceMemory, MemoryUse
    from engine.planning.plan import DevicePlan, Plan
    from engine.planning.planner import Planner
    from engine.planning.saved_plans import (
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
    from engine.planning.search.alternative import Alternative
    from engine.planning.search.estimate import TuneEstimate, TunePlan
    from engine.planning.search.results import (
        GOALS,
        Goal,
        Region,
        Sample,
        Speeds,
        Trial,
        TuneResult,
    )
    from engine.planning.search.results_file import TuneFile, last_result, result_document
    from engine.planning.speed.calibration import Calibration
    from engine.planning.speed.facts import DeviceFacts, LinkFacts, WireSpeed
    from engine.planning.speed.forecast import Forecast, Forecaster
    from engine.planning.speed.link_records import (
        LinkRecord,
        chosen_way,
        link_problems,
        record_document,
        speed_of,
    )
    from engine.planning.speed.machine_file import (
        MachineFile,
        known_facts,
        known_links,
        use_measured_overheads,
    )
    from engine.planning.speed.machine_links import Links
    from engine.planning.speed.prediction import Prediction, RankTime
    from engine.planning.speed.rigs import SIMULATED, Rig
    from engine.planning.speed.speed_model import SpeedModel
    from engine.planning.speed.wires import Wires
    from engine.planning.tensor_map import PlacementMap, TensorPlace
    from engine.planning.token_work import TokenWork, token_work
    from engine.programs import (
        NO_WINDOW,
        child_environment,
        program_command,
        tie_child,
        tie_to_parent,
    )
    from engine.progress import LoadProgress, StateProgress
    from engine.remote.command_numbers import CommandNumbers
    from engine.remote.process_host import ProcessHost
    from engine.runtime.kernel_proof import prove_cards
    from engine.runtime.timeline import RankTimes, TokenTimes
    from engine.sampling.on_device import why_sampled_on_host
    from engine.text.chat_template import ChatTemplate
    from engine.text.loader import load_chat_template, load_tokenizer
    from engine.text.messages import (
        PICTURE_PLACE,
        ChatMessage,
        PictureFile,
        Tool,
        ToolCall,
        text_size,
    )
    from engine.text.thinking import THINK_CLOSE, THINK_OPEN, ThoughtMarker
    from engine.tuning import tune
    from engine.version import package_version


_NAMES = {
    "api": ("Model", "load_model"),
    "config.grammar": ("Grammar", "GrammarKind", "form_of"),
    "config.kv_types": ("KV_TYPES", "KVTypes", "kv_types"),
    "config.load": (
        "DEFAULT_DRAFTED", "DRAFT_KINDS", "LEAST_DRAFT_VOCAB", "MACHINE_LINKS", "MMPROJ_KINDS",
        "MOST_DRAFTED", "PEER_MODES", "ROPE_SCALINGS", "SPLIT_MODES", "ControlVector", "DraftKind",
        "LoadParams", "MachineLink", "PeerMode",
    ),
    "config.sampling": ("SAMPLERS", "SamplingParams"),
    "constraints.checker": ("check_grammar",),
    "devices.builds": ("TorchKind", "suitable_torch"),
    "devices.catalog": ("cuda_status", "hidden_gpus", "list_devices"),
    "devices.links": ("Link", "Pcie", "Topology", "read_topology"),
    "devices.monitor": ("DeviceMonitor",),
    "devices.places": ("far_id", "is_cpu", "local_id", "machine_of"),
    "devices.routes": ("Way",),
    "devices.selection": ("parse_devices", "parse_target"),
    "devices.types": ("ClockLimit", "DeviceInfo", "DeviceSnapshot"),
    "errors": (
        "Cancelled", "CommError", "ContextOverflow", "DeviceError", "EngineCrashed", "EngineError",
        "EngineMissing", "GrammarError", "InvalidGGUF", "MachineLost", "MissingShard", "ModelBusy",
        "ModelFileError", "NoDevice", "OutOfDeviceMemory", "PictureError", "PromptError",
        "SplitError", "StateFileError", "TemplateError", "ToolError", "UnsupportedArchitecture",
        "UnsupportedQuant",
    ),
    "events": (
        "Command", "EngineReady", "Event", "Failed", "FallbacksChanged", "Generate", "HostEvent",
        "Load", "LoadState", "ModelLoaded", "ModelResplit", "ModelUnloaded", "Resplit", "SaveState",
        "Tune", "Tuned", "TuneProgress", "TuneStarted", "Unload", "WiresMeasured", "model_after",
    ),
    "files": (
        "atomic_write", "exposure", "has_ended", "make_private", "process_mark",
        "read_file", "sweep_temporaries", "tandem_folder", "temporary_folder",
    ),
    "generation.parts.thought_text": ("thought_apart",),
    "generation.results": (
        "AnswerPart", "ContextShifted", "Finished", "FinishReason", "PrefillProgress",
        "StateLoaded", "StateSaved", "Timings", "TokenLogprob", "TokenText", "ToolCallBegun",
        "ToolCallEnded", "ToolCallText", "Usage", "join_texts",
    ),
    "generation.scoring": ("Perplexity", "perplexity"),
    "gguf.header": ("is_header_whole",),
    "gpu.matmul.tuning_report": ("KernelTuning",),
    "hardware.card_records": ("card_problems",),
    "hardware.fallbacks": ("Fallback", "FallbackKind"),
    "hardware.garbage": ("collect_garbage",),
    "hardware.gpu_path": ("GpuPath", "find_gpu_path"),
    "hardware.trial_process": ("TrialProcess",),
    "harmless": ("error_line", "json_escaped", "one_line", "printable"),
    "host": ("EngineHost", "ThreadHost"),
    "inquiries.questions": (
        "ApplyTemplate", "CacheCounted", "CountCache", "CountTokens", "Detokenize", "Detokenized",
        "Embed", "Embedded", "ScoreTokens", "TemplateApplied", "Tokenize", "Tokenized",
        "TokensCounted", "TokensScored",
    ),
    "json_file": ("replace_json",),
    "limited.answering": ("answer_lines", "ending_after"),
    "limited.child": ("ChildEnded", "LimitedChild"),
    "links.proof": ("prove_links",),
    "machines.gathering": ("Gathering", "JoinedMachine"),
    "machines.interfaces": (
        "default_address", "listen_for_machines", "own_addresses", "parse_address",
    ),
    "machines.joining": ("JoinRequest", "join_machines"),
    "machines.lines": ("check_token",),
    "machines.machines_host": ("MachinesHost",),
    "measuring.benchmark": ("BenchResult", "BenchTest"),
    "measuring.kernel_tuning": ("tune_kernels",),
    "measuring.link_speed": ("LinkSpeed", "measure_link"),
    "measuring.machine_speed": ("DeviceSpeed", "measure_device", "measure_facts"),
    "measuring.product_speed": ("ProductSpeed", "measure_products", "product_types"),
    "models.description": ("Inspection", "ModelInfo", "TensorSummary"),
    "models.info": ("inspect_model", "read_model_info"),
    "models.registry": ("supported_architectures",),
    "pack": ("delete_pack", "leave_pack", "make_holdable", "pack_folders", "use_pack"),
    "pictures.decoding": ("UnusablePicture", "decode_picture"),
    "pictures.limits": ("MOST_PICTURES", "MOST_PIXELS"),
    "pictures.reading": ("picture_bytes", "picture_text"),
    "pictures.resizing": ("TooNarrow",),
    "pictures.sight": ("PictureSight",),
    "planning.choice": ("Choice", "choose"),
    "planning.evaluation.evaluator": ("Evaluation",),
    "planning.evaluation.fit": ("Fit", "Remedy", "Room"),
    "planning.evaluation.handle_positions": ("Position", "Positions"),
    "planning.machines.machine_choice": ("choose_machines", "machines_of", "rank_counts"),
    "planning.machines.machine_rigs": ("parse_rig",),
    "planning.memory": ("DeviceMemory", "MemoryUse"),
    "planning.plan": ("DevicePlan", "Plan"),
    "planning.planner": ("Planner",),
    "planning.saved_plans": (
        "AUTO_PLAN", "DeviceRef", "ModelKey", "PlanBadge", "PlanStore", "SavedPlan", "export_plan",
        "fastest_plan", "import_plan", "model_key",
    ),
    "planning.search.alternative": ("Alternative",),
    "planning.search.estimate": ("TuneEstimate", "TunePlan"),
    "planning.search.results": (
        "GOALS", "Goal", "Region", "Sample", "Speeds", "Trial", "TuneResult",
    ),
    "planning.search.results_file": ("TuneFile", "last_result", "result_document"),
    "planning.speed.calibration": ("Calibration",),
    "planning.speed.facts": ("DeviceFacts", "LinkFacts", "WireSpeed"),
    "planning.speed.forecast": ("Forecast", "Forecaster"),
    "planning.speed.link_records": (
        "LinkRecord", "chosen_way", "link_problems", "record_document", "speed_of",
    ),
    "planning.speed.machine_file": (
        "MachineFile", "known_facts", "known_links", "use_measured_overheads",
    ),
    "planning.speed.machine_links": ("Links",),
    "planning.speed.prediction": ("Prediction", "RankTime"),
    "planning.speed.rigs": ("SIMULATED", "Rig"),
    "planning.speed.speed_model": ("SpeedModel",),
    "planning.speed.wires": ("Wires",),
    "planning.tensor_map": ("PlacementMap", "TensorPlace"),
    "planning.token_work": ("TokenWork", "token_work"),
    "programs": ("NO_WINDOW", "child_environment", "program_command", "tie_child", "tie_to_parent"),
    "progress": ("LoadProgress", "StateProgress"),
    "remote.command_numbers": ("CommandNumbers",),
    "remote.process_host": ("ProcessHost",),
    "runtime.kernel_proof": ("prove_cards",),
    "runtime.timeline": ("RankTimes", "TokenTimes"),
    "sampling.on_device": ("why_sampled_on_host",),
    "text.chat_template": ("ChatTemplate",),
    "text.loader": ("load_chat_template", "load_tokenizer"),
    "text.messages": (
        "PICTURE_PLACE", "ChatMessage", "PictureFile", "Tool", "ToolCall", "text_size",
    ),
    "text.thinking": ("THINK_CLOSE", "THINK_OPEN", "ThoughtMarker"),
    "tuning": ("tune",),
    "version": ("package_version",),
}  # fmt: skip
"""Public names of each module; the imports above tell type checkers the same."""

_MODULE_OF = {name: f"engine.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)

if os.environ.get("TANDEM_ENGINE_PACK"):  # the parent process has chosen where torch lies
    import_module("engine.pack").add_pack()


def __getattr__(name: str) -> object:
    """Import the module that defines `name`, on first use.

    Raises:
        EngineMissing: it needs a library that is not installed.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in import_module("engine.pack").LIBRARIES:
            raise
        raise import_module("engine.errors").EngineMissing(error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, before their first use as well."""
    return __all__
