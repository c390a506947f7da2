"""Finds what the installed PyTorch was built for, CUDA or ROCm, without importing it.

Importing torch takes seconds, which a list of devices should not wait for.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

__all__ = ["TorchBuild", "find_torch_build"]

LINE = r"^{name}\b[^=]*=\s*(.+?)\s*$"
"""Pattern of a line of torch/version.py."""

OF_PYTORCH = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(\+(cu[0-9]+|cpu|rocm[0-9.]+))?")
"""Pattern of the versions of PyTorch's own builds; others may have code for other GPUs."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed build of PyTorch.

    Args:
        is_installed: whether torch is installed at all.
        cuda: version of CUDA such as "12.8"; "unknown" where it cannot be told, "" for none.
        hip: version of HIP, which is ROCm's, such as "7.2"; "" for none.
        version: version of torch such as "2.15.0+cu130"; "" where it cannot be told.
    """

    is_installed: bool
    cuda: str
    hip: str = ""
    version: str = ""

    @property
    def cuda_major(self) -> int | None:
        """Major version of CUDA; None if unknown or none."""
        major = self.cuda.partition(".")[0]
        return int(major) if major.isdigit() else None

    @property
    def has_gpus(self) -> bool:
        """Whether the build can use GPUs at all."""
        return bool(self.cuda or self.hip)

    @property
    def is_official(self) -> bool:
        """Whether PyTorch published it, so that it has code for the GPUs that PyTorch names."""
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
    """Return a value of torch/version.py, "" for Python's None; None if there is no such line."""
    match = re.search(LINE.format(name=name), source, re.MULTILINE)
    if match is None:
        return None
    value = match.group(1).strip("'\"")
    return "" if value == "None" else value


def _version_source() -> str | None:
    """Return the text of torch/version.py; None without torch or such a file (frozen apps)."""
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
