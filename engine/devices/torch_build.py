"""Finds the CUDA version that the installed PyTorch was built for, without importing it.

Importing torch takes seconds, which a list of devices should not wait for.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

__all__ = ["TorchBuild", "find_torch_build"]

CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed build of PyTorch.

    Args:
        is_installed: whether torch is installed at all.
        cuda: version of CUDA such as "12.8"; "unknown" where it cannot be told, "" for none.
    """

    is_installed: bool
    cuda: str

    @property
    def cuda_major(self) -> int | None:
        """Major version of CUDA; None if unknown or none."""
        major = self.cuda.partition(".")[0]
        return int(major) if major.isdigit() else None


def find_torch_build() -> TorchBuild:
    """Return the installed build of PyTorch."""
    # absent while another thread imports torch
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        return TorchBuild(True, loaded.cuda or "")
    source = _version_source()
    if source is None:
        return _build_from_metadata()
    match = CUDA_LINE.search(source)
    value = match.group(1).strip("'\"") if match else "unknown"
    return TorchBuild(True, "" if value == "None" else value)


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
    # a version without a suffix comes from PyPI, where only the Linux builds have CUDA
    has_cuda = "+cu" in version or ("+" not in version and sys.platform == "linux")
    return TorchBuild(True, "unknown" if has_cuda else "")
