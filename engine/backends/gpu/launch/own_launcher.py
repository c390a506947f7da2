"""Launcher for Triton's kernels that needs neither a C compiler nor Python.h.

Triton has a driver object that describes the device, loads compiled kernels and launches them.
`OwnDriver` is one for NVIDIA GPUs, written with ctypes. Triton still compiles kernels and, once for
equal launches (`kernel_launch`), chooses the variant for the arguments.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any, Literal

import torch

from engine.backends.gpu.launch import configs
from engine.backends.gpu.launch.configs import configs_file, read_configs
from engine.backends.gpu.launch.kernel_cache import use_cache
from engine.errors import EngineError, Sentence
from engine.hardware.backend_choice import LAUNCHER_VARIABLE, launcher_problem, triton_version
from engine.hardware.cuda_api import (
    DEVICE_BUS_WIDTH,
    DEVICE_CLOCK,
    DEVICE_MEMORY_CLOCK,
    DEVICE_PROCESSORS,
    DEVICE_REGISTERS,
    DEVICE_SHARED_BYTES,
    DEVICE_SHARED_BYTES_OPT_IN,
    DEVICE_WARP,
    NO_CONTEXT,
    CudaApi,
)
from engine.hardware.fallbacks import OF_THIS_PROCESS

WARP = 32

Start = Callable[[Sequence[int], int, Sequence[float]], None]
"""Function that launches one compiled kernel; parameters as in `OwnLauncher.start`."""

Launcher = Literal["triton", "own"]
"""Launcher for kernels: Triton's, which needs a C compiler once, or Tandem's own."""

log = logging.getLogger(__name__)

SIZES: Mapping[str, int] = {
    "i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
    "f32": 4, "fp32": 4, "fp64": 8, "*": 8,
}  # fmt: skip
"""Bytes per parameter for each of Triton's types; "*" is an address."""

N_SCRATCH = 2  # number of scratch memory addresses after a kernel's own arguments
SLOT_BYTES = 8  # bytes per argument slot, of which CUDA reads the parameter's size
MAX_ARGUMENTS = 128  # max. arguments of a kernel, including scratch memory

PACKED = {"f32": "f4x", "fp32": "f4x", "fp64": "d", "u64": "Q", "*": "Q"}
"""`struct` format for an argument's slot, by Triton's type; "q" for other integers.

Little-endian, like all processors that CUDA runs on.
"""

NO_SCRATCH = "8x"  # format for the scratch memory address if a kernel needs none: zeros


def parameter_types(signature: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return the index and Triton's type of each argument that a compiled kernel reads.

    Args:
        signature: Triton's type for each argument, in order; "constexpr" for compiled-in constants,
            which are not read.

    Raises:
        ValueError: an argument has a type that cannot be passed.
    """
    found: list[tuple[int, str]] = []
    for place, (name, kind) in enumerate(signature.items()):
        if kind == "constexpr":
            continue
        kind = "*" if str(kind).startswith("*") else kind
        if kind not in SIZES:
            raise ValueError(f"{name} is of the type {kind}, which cannot be passed to a kernel")
        found.append((place, kind))
    return found


def parameter_bytes(signature: Mapping[str, str]) -> list[int]:
    """Return the bytes of each parameter of a compiled kernel, including scratch memory."""
    return [SIZES[kind] for _, kind in parameter_types(signature)] + [SLOT_BYTES] * N_SCRATCH


class _Arguments(threading.local):
    """A thread's memory for the current launch's arguments, and the address of each slot.

    The driver copies the arguments before it returns. Each thread needs its own memory: ctypes
    calls release the GIL, so other threads may launch in parallel.
    """

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint64 * MAX_ARGUMENTS)()
        first = ctypes.addressof(self.memory)
        places = range(first, first + SLOT_BYTES * MAX_ARGUMENTS, SLOT_BYTES)
        self.addresses = (ctypes.c_void_p * MAX_ARGUMENTS)(*places)


_arguments = _Arguments()


class OwnLauncher:
    """Launcher for one compiled kernel; Triton creates it when it loads the kernel.

    Args:
        source: Triton's source for the kernel, with its signature.
        metadata: the compiler's metadata for the kernel.
        current_device: returns the index of the device on which to launch.

    Raises:
        ValueError: the kernel needs a kind of launch that is not implemented here.
    """

    def __init__(
        self, api: CudaApi, source: Any, metadata: Any, current_device: Callable[[], int]
    ) -> None:
        if getattr(metadata, "num_ctas", 1) != 1 or metadata.launch_cooperative_grid:
            raise ValueError(f"{metadata.name} needs clusters or a cooperative start")
        self._api, self._launch = api, api.launch_kernel
        self._current_device = current_device
        self._name = metadata.name
        types = parameter_types(source.signature)
        self._places = [place for place, _ in types]
        self._sizes = parameter_bytes(source.signature)
        self._scratch_bytes = metadata.global_scratch_size, metadata.profile_scratch_size
        formats = [PACKED.get(kind, "q") for _, kind in types]
        formats += [PACKED["*"] if any(self._scratch_bytes) else NO_SCRATCH] * N_SCRATCH
        self._pack_into = struct.Struct("<" + "".join(formats)).pack_into
        self._n_threads = WARP * metadata.num_warps
        self._shared_bytes = metadata.shared
        self._function: ctypes.c_void_p | None = None

    def loaded(self, function: int, places: Sequence[int]) -> Start:
        """Return the function that launches the loaded kernel; see `start`.

        Args:
            function: handle of the loaded kernel.
            places: indices of the function's values among the kernel's parameters; the kernel need
                not read all of them, since a 1 may be compiled in.

        Raises:
            ValueError: the compiled kernel's parameters differ from its signature.
        """
        self._load(function)
        start = self._start_with_scratch if any(self._scratch_bytes) else self.start
        if list(places) == self._places:
            return start
        read = [places.index(place) for place in self._places]
        return lambda grid, stream, values: start(grid, stream, [values[n] for n in read])

    def _load(self, function: int) -> None:
        sizes = self._api.parameter_bytes(function)
        if sizes is not None and list(sizes) != self._sizes[: len(sizes)]:
            raise ValueError(
                f"{self._name} takes parameters of {list(sizes)} bytes, not {self._sizes}"
            )
        self._function = ctypes.c_void_p(function)

    def start(self, grid: Sequence[int], stream: int, values: Sequence[float]) -> None:
        """Launch the loaded kernel.

        This runs for each launch, so it does as little as possible: it fills the slots and calls
        the driver. Numbers are passed as C ints, anything longer as `c_void_p`.

        Args:
            grid: number of programs in x, y and z; none is 0.
            stream: handle of the CUDA stream.
            values: for each argument that the kernel reads, a number or an address in memory.

        Raises:
            EngineError: the driver refuses the launch.
        """
        own = _arguments
        self._pack_into(own.memory, 0, *values)
        failed = self._launch(
            self._function, *grid, self._n_threads, 1, 1, self._shared_bytes,
            ctypes.c_void_p(stream), own.addresses, None,
        )  # fmt: skip
        if failed == NO_CONTEXT:  # torch has not used the device on this thread yet
            self._api.enter(self._current_device())
            failed = self._launch(
                self._function, *grid, self._n_threads, 1, 1, self._shared_bytes,
                ctypes.c_void_p(stream), own.addresses, None,
            )  # fmt: skip
        if failed:
            self._api.check("cuLaunchKernel", failed)

    def _start_with_scratch(
        self, grid: Sequence[int], stream: int, values: Sequence[float]
    ) -> None:
        """Launch a kernel that needs scratch memory, which torch reuses in stream order."""
        n_program = prod(grid)
        held = [
            torch.empty(n * n_program, dtype=torch.uint8, device="cuda")
            for n in self._scratch_bytes
        ]
        self.start(grid, stream, [*values, *(made.data_ptr() for made in held)])

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: object, about: object,
        on_enter: object, on_exit: object, *args: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; called by Triton, with the parameters for Triton's own launcher.

        `args` has all arguments in order, including constants.
        """
        if 0 in (x, y, z):
            return
        start = self.loaded(function, self._places)
        start((x, y, z), stream, [_value(args[place]) for place in self._places])


def _value(argument: Any) -> Any:
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


class OwnUtils:
    """The driver's utility functions, under the names that Triton uses."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api

    def load_binary(
        self, name: str, code: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return self._api.load(name, code, shared_bytes, device)

    def unload_module(self, module: int) -> None:
        self._api.unload(module)

    def get_device_properties(self, device: int) -> dict[str, int]:
        plain = self._api.device_attribute(DEVICE_SHARED_BYTES, device)
        numbers = {
            "max_num_regs": DEVICE_REGISTERS, "multiprocessor_count": DEVICE_PROCESSORS,
            "warpSize": DEVICE_WARP, "sm_clock_rate": DEVICE_CLOCK,
            "mem_clock_rate": DEVICE_MEMORY_CLOCK, "mem_bus_width": DEVICE_BUS_WIDTH,
        }  # fmt: skip
        return {
            "max_shared_mem": self._api.device_attribute(DEVICE_SHARED_BYTES_OPT_IN, device)
            or plain,
            **{name: self._api.device_attribute(n, device) for name, n in numbers.items()},
        }


class OwnDriver:
    """Triton's active driver object; its methods mirror those of Triton's own driver."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self.utils = OwnUtils(api)

    def launcher_cls(self, source: Any, metadata: Any) -> OwnLauncher:
        return OwnLauncher(self._api, source, metadata, self.get_current_device)

    def get_current_target(self) -> Any:
        make_target = import_module("triton.backends.compiler").GPUTarget
        major, minor = self.get_device_capability()
        return make_target("cuda", 10 * major + minor, WARP)

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def assemble_tensormap_to_arg(self, about: object, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments unchanged; older Tritons replace tensor descriptors, unused here."""
        return args


_lock = threading.Lock()
_found: dict[str, Launcher | EngineError] = {}


def prepare() -> Launcher:
    """Choose the launcher and set up the kernel cache; later calls return the same choice.

    Raises:
        EngineError: kernels cannot be launched on this machine; torch can compute without them.
    """
    found = _found.get("")
    if found is None:
        with _lock:
            found = _found.get("") or _choice_or_error()
            _found[""] = found
    if isinstance(found, EngineError):
        raise found
    return found


def _choice_or_error() -> Launcher | EngineError:
    try:
        return _choose()
    except EngineError as error:
        return error


def _choose() -> Launcher:
    version = triton_version()
    if not version:
        raise EngineError(
            "Triton, which compiles the GPU kernels, is not installed.",
            "Install triton (on Windows, triton-windows).",
        )
    use_cache(targets(), version)
    configs.use_found(read_configs(configs_file()))
    why = launcher_problem()
    if not why and (torch.version.hip or os.environ.get(LAUNCHER_VARIABLE) != "own"):
        why = _build_launcher()
        if not why:
            return "triton"
    if torch.version.hip:
        raise EngineError(
            "Kernels cannot be launched on AMD GPUs because {why}.",
            "Install gcc and Python's headers (python3-dev).",
            why=why,
        )
    _triton_driver().set_active(OwnDriver(CudaApi.open()))
    log.info("kernels are launched by Tandem's own launcher%s", why and f": {why}")
    helps = Sentence("Unset the environment variable {name}.", name=LAUNCHER_VARIABLE)
    chosen = Sentence("{name} is set to “own”", name=LAUNCHER_VARIABLE)
    OF_THIS_PROCESS.report("launcher", (), why or chosen, "" if why else helps)
    return "own"


def targets() -> str:
    """Return the targets of all this machine's GPUs as one name, for example "sm86+sm90"."""
    numbers = range(torch.cuda.device_count())
    if torch.version.hip:
        names = {str(torch.cuda.get_device_properties(n).gcnArchName) for n in numbers}
        return "+".join(sorted(name.partition(":")[0] for name in names)) or "hip"
    capabilities = {torch.cuda.get_device_capability(n) for n in numbers}
    return "+".join(f"sm{major}{minor}" for major, minor in sorted(capabilities)) or "cuda"


def _build_launcher() -> str:
    """Make Triton build its launcher or load it from its cache; return why that fails, or ""."""
    try:
        _ = _triton_driver().active.utils
    except Exception as error:  # noqa: BLE001 compilers fail in many ways
        return Sentence("Triton's own launcher fails ({problem})", problem=_first_line(error))
    return ""


def _triton_driver() -> Any:
    return import_module("triton.runtime").driver


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
