"""Tandem's engine, which runs one GGUF language model on all devices of a machine.

The imports below are the public interface; front ends use nothing else. Each runs when its name is
first used, so that `import engine` is cheap and only code that computes imports torch.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api import Model, load_model
    from engine.backends.gpu.matmul.config_search import KernelTuning
    from engine.decoding.grammar.checker import check_grammar
    from engine.decoding.sampling.sampler import why_sampled_on_host
    from engine.errors import (
        Cancelled,
        CommError,
        ContextOverflow,
        DeviceError,
        EngineCrashed,
        EngineError,
        EngineMissing,
        GrammarError,
        ImageError,
        InvalidGGUF,
        MachineLost,
        MissingShard,
        ModelBusy,
        ModelFileError,
        NoDevice,
        OutOfDeviceMemory,
        PromptError,
        Sentence,
        SplitError,
        StateFileError,
        TemplateError,
        ToolError,
        UnsupportedArchitecture,
        UnsupportedQuant,
        reason_of,
    )
    from engine.events import (
        AnswerBlock,
        AnswerBlocks,
        BlockChange,
        Command,
        EngineReady,
        Event,
        Failed,
        FallbacksChanged,
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
        new_command_id,
    )
    from engine.formats.gguf.header import is_header_whole
    from engine.generation.benchmark import BenchResult, BenchTest, perplexity
    from engine.generation.requests import (
        AnswerRequest,
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
    from engine.hardware.backend_choice import find_gpu_path
    from engine.hardware.card_records import card_problems
    from engine.hardware.devices.catalog import (
        cuda_status,
        hidden_gpus,
        list_devices,
        parse_devices,
        parse_target,
        suitable_torch,
    )
    from engine.hardware.devices.monitor import DeviceMonitor
    from engine.hardware.devices.topology import Link, Pcie, Topology, read_topology
    from engine.hardware.devices.types import (
        ClockLimit,
        DeviceInfo,
        DeviceSnapshot,
        far_id,
        is_cpu,
        local_id,
        machine_of,
    )
    from engine.hardware.fallbacks import Fallback
    from engine.hardware.garbage import collect_garbage
    from engine.hardware.trial_process import TrialProcess
    from engine.hosts.machines.gathering import Gathering, JoinedMachine
    from engine.hosts.machines.interfaces import (
        default_address,
        listen_for_machines,
        own_addresses,
        parse_address,
    )
    from engine.hosts.machines.joining import JoinRequest, join_machines
    from engine.hosts.machines.lines import check_token
    from engine.hosts.machines.machines_host import MachinesHost
    from engine.hosts.process.process_host import ProcessHost
    from engine.hosts.thread_host import EngineHost, ThreadHost
    from engine.hosts.tuning import tune
    from engine.load_params import (
        DEFAULT_DRAFTED,
        DRAFT_KINDS,
        KV_TYPES,
        LOAD_DEFAULTS,
        LOAD_OPTIONS,
        MACHINE_LINKS,
        MAX_DRAFTED,
        MIN_DRAFT_VOCAB,
        MMPROJ_KINDS,
        PEER_MODES,
        ROPE_SCALINGS,
        SHARED_LOAD_OPTIONS,
        SPLIT_MODES,
        ControlVector,
        KVTypes,
        LoadOption,
        LoadOptions,
        LoadParams,
        PeerMode,
        kv_types,
        load_option,
    )
    from engine.model.architectures.description import Inspection, ModelInfo
    from engine.model.architectures.info import inspect_model, read_model_info
    from engine.model.architectures.registry import supported_architectures
    from engine.planning.choice import Choice, choose
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.evaluation.fit import Fit, Remedy, Room
    from engine.planning.evaluation.handle_positions import Position, Positions
    from engine.planning.machines import choose_machines, machines_of, parse_rig, rank_counts
    from engine.planning.memory import DeviceMemory, MemoryUse
    from engine.planning.plan import DevicePlan, Plan
    from engine.planning.planner import PlacementMap, Planner, TensorPlace
    from engine.planning.saved_plans import (
        AUTO_PLAN,
        ModelKey,
        PlanBadge,
        PlanStore,
        SavedPlan,
        export_plan,
        fastest_plan,
        import_plan,
        model_key,
    )
    from engine.planning.search.estimate import Alternative, TuneEstimate, TunePlan
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
    from engine.planning.speed.facts import DeviceFacts, LinkFacts, Prediction, WireSpeed
    from engine.planning.speed.forecast import Calibration, Forecast, Forecaster
    from engine.planning.speed.link_records import (
        LinkRecord,
        chosen_way,
        link_problems,
        record_document,
        speed_of,
    )
    from engine.planning.speed.links import Links, Wires
    from engine.planning.speed.machine_file import (
        MachineFile,
        known_facts,
        known_links,
        use_measured_overheads,
    )
    from engine.planning.speed.rigs import SIMULATED, Rig
    from engine.planning.threads import TokenWork, token_work
    from engine.runtime.interconnect.proof import prove_links
    from engine.runtime.kernel_proof import prove_cards
    from engine.runtime.measuring.kernel_tuning import tune_kernels
    from engine.runtime.measuring.link_speed import LinkSpeed, measure_link
    from engine.runtime.measuring.machine_speed import DeviceSpeed, measure_device, measure_facts
    from engine.runtime.measuring.weight_speed import ProductSpeed, measure_products, product_types
    from engine.runtime.timeline import RankTimes, TokenTimes
    from engine.sampling_params import SAMPLERS, Grammar, SamplingParams, form_of
    from engine.text.chat_template import load_chat_template, load_tokenizer
    from engine.text.messages import (
        IMAGE_PLACEHOLDER,
        THINK_CLOSE,
        THINK_OPEN,
        ChatMessage,
        ImageFile,
        ThoughtMarker,
        Tool,
        ToolCall,
        text_size,
        thought_apart,
    )
    from engine.util.child_program import answer_lines, ending_after
    from engine.util.codec import (
        JsonObject,
        JsonSchema,
        ReadNotes,
        WrongValue,
        document_schema,
        read_document,
        read_value,
    )
    from engine.util.files import (
        atomic_write,
        exposure,
        has_ended,
        make_private,
        process_mark,
        read_file,
        replace_json,
        sweep_temporaries,
        tandem_folder,
        temporary_folder,
    )
    from engine.util.pack import delete_pack, leave_pack, make_holdable, pack_folders, use_pack
    from engine.util.programs import (
        NO_WINDOW,
        child_environment,
        program_command,
        tie_child,
        tie_to_parent,
    )
    from engine.util.progress import LoadProgress, StateProgress
    from engine.util.sandbox import ChildEnded, LimitedChild
    from engine.util.sanitize import error_line, json_escaped, one_line, package_version, printable
    from engine.vision.images.decoding import MAX_IMAGES, MAX_PIXELS, UnusableImage, decode_image
    from engine.vision.images.placed import VisionInfo
    from engine.vision.images.reading import image_base64, image_bytes
    from engine.vision.images.resizing import TooNarrow


def _public_names() -> dict[str, str]:
    """Return the module of each name that the block above imports for type checkers."""
    source: str = __loader__.get_source(__name__)  # type: ignore[name-defined]
    block = re.search(r"^if TYPE_CHECKING:\n(.*?)^\S", source, re.DOTALL | re.MULTILINE)
    imports = re.findall(r"from (\S+) import (\([^)]*\)|.*)", block[1] if block else "")
    return {name: module for module, names in imports for name in re.findall(r"\w+", names)}


_MODULE_OF = _public_names()

__all__ = sorted(_MODULE_OF)

if os.environ.get("TANDEM_ENGINE_PACK"):  # chosen by the parent process
    import_module("engine.util.pack").add_pack()


def __getattr__(name: str) -> object:
    """Import the module that defines `name`, on first use.

    Raises:
        EngineMissing: the module needs a library that is not installed.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in import_module("engine.util.pack").LIBRARIES:
            raise
        raise import_module("engine.errors").EngineMissing(error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, even before their first use."""
    return __all__
