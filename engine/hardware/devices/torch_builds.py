"""The installed PyTorch build, why it cannot use a GPU, and which build can.

This is found without importing torch, which would delay a list of devices by seconds.

The table of builds is as of November 2026, from these sources:

- Releases and the GPUs they support: RELEASE.md of pytorch/pytorch, its pull requests
  175253 (2.11) and 182849 (2.12), and its issues 178665 (2.12 is the first without CUDA 12.8),
  190355 (2.14) and 190385 (2.15 is the first without CUDA 12.6, and so without Maxwell, Pascal
  and Volta). PyPI's 2.15 needs CUDA 13.2, according to its metadata.
- Drivers: NVIDIA's "CUDA Compatibility", minor version compatibility: CUDA 13 runs on drivers from
  580 on, CUDA 12 from 525 on. It has no separate list for Windows.
- AMD: RELEASE.md names ROCm 7.14 for 2.14, only on Linux. AMD publishes builds for Windows and for
  more cards at stable.repo.amd.com (TheRock's RELEASES.md), as extras named after the card.

None of the commands has been tried on a card.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from engine.errors import Sentence

LINE = r"^{name}\b[^=]*=\s*(.+?)\s*$"
"""Pattern for a line in torch/version.py."""

OF_PYTORCH = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(\+(cu[0-9]+|cpu|rocm[0-9.]+))?")
"""Pattern for the versions of PyTorch's own builds; other builds may support other GPUs."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed build of PyTorch.

    Args:
        cuda: CUDA version, such as "12.8"; "unknown" if it cannot be read, "" if there is none.
        hip: HIP version (the same as ROCm's), such as "7.2"; "" if there is none.
        version: torch version, such as "2.15.0+cu130"; "" if it cannot be read.
    """

    is_installed: bool
    cuda: str
    hip: str = ""
    version: str = ""

    @property
    def cuda_major(self) -> int | None:
        """Major version of CUDA; None if it is unknown or there is none."""
        major = self.cuda.partition(".")[0]
        return int(major) if major.isdigit() else None

    @property
    def has_gpus(self) -> bool:
        """Whether the build can use GPUs at all."""
        return bool(self.cuda or self.hip)

    @property
    def is_official(self) -> bool:
        """Whether PyTorch published the build, so that it supports the documented GPUs."""
        return OF_PYTORCH.fullmatch(self.version) is not None


def find_torch_build() -> TorchBuild:
    """Return the installed build of PyTorch."""
    # absent while another thread imports torch
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        hip, version = (getattr(loaded, name, None) or "" for name in ("hip", "__version__"))
        return TorchBuild(True, loaded.cuda or "", hip, str(version))
    source = _version_source()
    if source is None:
        return _build_from_metadata()
    hip = _value(source, "hip") or ""
    cuda = _value(source, "cuda")
    if cuda is None:
        cuda = "" if hip else "unknown"
    return TorchBuild(True, cuda, hip, _value(source, "__version__") or "")


def _value(source: str, name: str) -> str | None:
    # None if there is no such line, "" for Python's None
    match = re.search(LINE.format(name=name), source, re.MULTILINE)
    if match is None:
        return None
    value = match.group(1).strip("'\"")
    return "" if value == "None" else value


def _version_source() -> str | None:
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    try:
        return Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None


def _build_from_metadata() -> TorchBuild:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return TorchBuild(is_installed=False, cuda="")
    hip = version.partition("+rocm")[2]
    # a version without a suffix comes from PyPI, where only the Linux builds have CUDA
    has_cuda = "+cu" in version or ("+" not in version and sys.platform == "linux")
    return TorchBuild(True, "unknown" if has_cuda else "", hip, version)


INDEX = "https://download.pytorch.org/whl/"
"""Address of PyTorch's package indexes."""

AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next/"
"""Address of AMD's package index, with builds for Linux and Windows."""

ROCM = "rocm7.14"
"""Newest of PyTorch's indexes for ROCm."""

FIRST_DRIVERS: Mapping[int, str] = {13: "580", 12: "525"}
"""First driver for each major version of CUDA."""

ARM = ("aarch64", "arm64")
"""Names of ARM processors, which have separate builds."""


@dataclass(frozen=True, slots=True)
class CudaWheel:
    """One of PyTorch's builds for CUDA.

    Attributes:
        requirement: pip requirement for the releases from 2.11 on that have this build.
        archs: supported compute capabilities on x86.
        arm_archs: supported compute capabilities on ARM (Linux).
    """

    cuda: str
    requirement: str
    archs: tuple[str, ...]
    arm_archs: tuple[str, ...]

    @property
    def major(self) -> int:
        """Major version of CUDA."""
        return int(self.cuda.partition(".")[0])

    @property
    def command(self) -> str:
        """Command that installs this build in place of another."""
        index = f"{INDEX}cu{self.cuda.replace('.', '')}"
        return f'pip install --force-reinstall "{self.requirement}" --index-url {index}'

    def has_code_for(self, capability: str) -> bool:
        """Return whether the build supports a compute capability.

        True if the capability is unknown ("") or newer than this table.
        """
        archs = self.arm_archs if platform.machine().lower() in ARM else self.archs
        return not capability or any(runs_on(arch, capability) for arch in (*archs, *NEWER))


NEWER = tuple(f"{major}.0" for major in range(13, 30))
"""Compute capabilities released after this table."""

X86_13 = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
ARM_13 = ("8.0", "9.0", "10.0", "11.0", "12.0")

WHEELS = (
    CudaWheel("13.0", "torch>=2.11", X86_13, ARM_13),
    CudaWheel(
        "12.6", "torch>=2.11,<2.15",
        ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0"), ("8.0", "9.0"),
    ),
    CudaWheel("12.8", "torch>=2.11,<2.12", X86_13, ("8.0", "9.0", "10.0", "12.0")),
    CudaWheel("13.2", "torch>=2.12", X86_13, ARM_13),
)  # fmt: skip
"""PyTorch's builds from 2.11 on, in order of preference. 13.2 comes last because 13.0 runs on the
same cards and has been in use for longer."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Why a GPU cannot be used, as a sentence, and the command to fix that; both may be ""."""

    reason: str = ""
    remedy: str = ""


def runs_on(arch: str, capability: str) -> bool:
    """Return whether code for `arch` runs on `capability`: same major version, not older."""
    have, need = (tuple(int(part) for part in text.split(".")) for text in (arch, capability))
    return have[0] == need[0] and have[1] <= need[1]


def choose_wheel(capabilities: Sequence[str], driver_cuda: int | None) -> CudaWheel | None:
    """Return the build to install for some GPUs; None if none supports all of them.

    Args:
        capabilities: compute capability of each GPU, such as "8.9"; "" if unknown.
        driver_cuda: newest major version of CUDA that the driver supports; None if unknown.
    """
    return next(
        (
            wheel for wheel in WHEELS
            if all(wheel.has_code_for(capability) for capability in capabilities)
            and wheel.major <= (driver_cuda or wheel.major)
        ),
        None,
    )  # fmt: skip


def advise_nvidia(
    build: TorchBuild, capability: str, driver_cuda: int | None, others: Sequence[str] = ()
) -> Advice:
    """Return why the installed build cannot use an NVIDIA GPU, and a remedy.

    Args:
        others: compute capabilities of other GPUs that a new build should also support.
    """
    reason = _nvidia_problem(build, capability, driver_cuda)
    if not reason:
        return Advice()
    one = (capability,)
    wheel = choose_wheel((*one, *others), driver_cuda) or choose_wheel(one, driver_cuda)
    if wheel is not None:
        return Advice(reason, wheel.command)
    newer = choose_wheel(one, None)
    if newer is None:
        reason = (
            "PyTorch 2.11 and later have no code for GPUs of compute capability {capability};"
            " Tandem cannot use this one."
        )
        return Advice(Sentence(reason, capability=capability))
    return Advice(
        Sentence(
            "The NVIDIA driver is too old for every PyTorch build that can use this GPU; update it"
            " to {version} or newer.",
            version=FIRST_DRIVERS[newer.major],
        ),
        "" if build.cuda_major == newer.major else newer.command,
    )


def _nvidia_problem(build: TorchBuild, capability: str, driver_cuda: int | None) -> str:
    if not build.is_installed:
        return Sentence(
            "An NVIDIA driver is installed, but PyTorch is not; install torch to run models."
        )
    if build.hip:
        return Sentence(
            "This PyTorch build is for AMD GPUs (ROCm); install a CUDA build of torch to use this"
            " GPU instead."
        )
    if not build.cuda:
        return Sentence(
            "An NVIDIA driver is installed, but this PyTorch build has no CUDA support; install a"
            " CUDA build of torch to use the GPUs."
        )
    # a driver supports all CUDA versions with its major version, even newer ones
    if driver_cuda and build.cuda_major and driver_cuda < build.cuda_major:
        first = FIRST_DRIVERS.get(build.cuda_major)
        return Sentence(
            "The NVIDIA driver supports CUDA {n}, but this PyTorch build needs CUDA {cuda}; update"
            " the driver to {version} or newer, or install an older build."
            if first
            else "The NVIDIA driver supports CUDA {n}, but this PyTorch build needs CUDA {cuda};"
                " update the driver, or install an older build.",
            n=driver_cuda, cuda=build.cuda, version=first or "",
        )  # fmt: skip
    installed = next((wheel for wheel in WHEELS if wheel.cuda == build.cuda), None)
    if installed and build.is_official and not installed.has_code_for(capability):
        return Sentence(
            "This PyTorch build (CUDA {cuda}) has no code for GPUs of compute capability"
            " {capability}; install one that has.",
            cuda=build.cuda,
            capability=capability,
        )
    return ""


def advise_amd(build: TorchBuild, arch: str = "") -> Advice:
    """Return why the installed build cannot use an AMD GPU with this `arch`, and a remedy."""
    if build.hip:
        return Advice()
    reason = Sentence(
        "There is an AMD GPU, but PyTorch is not installed; install a ROCm build of torch to use"
        " AMD GPUs."
        if not build.is_installed
        else "This PyTorch build is for NVIDIA GPUs (CUDA); install a ROCm build of torch to use"
        " AMD GPUs."
        if build.cuda
        else "This PyTorch build has no GPU support; install a ROCm build of torch to use AMD GPUs."
    )
    return Advice(reason, amd_command(arch))


def amd_command(arch: str = "", *, from_amd: bool = False) -> str:
    """Return the command that installs a build for AMD GPUs.

    Args:
        arch: instruction set, such as "gfx1100"; "" if unknown.
        from_amd: whether to use AMD's build; on Windows, it is always used.
    """
    if sys.platform == "win32" or from_amd:
        extra = f"device-{arch}" if arch else "device-all"
        return f'pip install --force-reinstall "torch[{extra}]>=2.11" --index-url {AMD_INDEX}'
    return f'pip install --force-reinstall "torch>=2.11" --index-url {INDEX}{ROCM}'
