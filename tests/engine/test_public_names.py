"""The public names of `engine`, and the modules that importing it leaves out."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine

PACKAGE = Path(engine.__file__).parent
TORCH_FREE_PACKAGES = [
    "engine.hardware.devices",
    "engine.formats.gguf",
    "engine.model.layers",
    "engine.model.architectures",
    "engine.planning",
    "engine.decoding.sampling",
    "engine.model.sharding",
    "engine.text.templates",
    "engine.text",
]
"""Packages that plan, read headers, declare models and handle text."""

TORCH_FREE = [
    "app.__main__",
    "engine",
    "engine.errors",
    "engine.events",
    "engine.util.files",
    "engine.generation.prompts",
    "engine.generation.results",
    "engine.generation.benchmark",
    "engine.generation.state_format",
    "engine.hosts.thread_host",
    "engine.util.files",
    "engine.generation.benchmark",
    "engine.util.programs",
    "engine.util.progress",
    "engine.hosts.process.process_host",
    "engine.hosts.process.program",
]


@pytest.mark.parametrize("name", engine.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(engine, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    """They read imports that never run."""
    tree = ast.parse(Path(engine.__file__).read_text(encoding="utf-8"))
    (block,) = (part for part in tree.body if isinstance(part, ast.If) and "TYPE" in ast.dump(part))
    imports = [part for part in block.body if isinstance(part, ast.ImportFrom)]
    seen = {alias.name: part.module for part in imports for alias in part.names}
    assert seen == engine._MODULE_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = engine.nothing_like_this


@pytest.mark.parametrize("name", ["load_model", "measure_device"])
def test_what_torch_reads_is_set_before_it_is_imported(name: str) -> None:
    """A person's own choice stays."""
    code = (
        "import os, sys, types; seen = {}\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': seen.update(os.environ)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"from engine import {name}\n"
        "print(seen['CUDA_DEVICE_ORDER'], seen['OMP_WAIT_POLICY'])"
    )
    chosen = {**os.environ, "OMP_WAIT_POLICY": "ACTIVE"}
    chosen.pop("CUDA_DEVICE_ORDER", None)
    run = subprocess.run([sys.executable, "-c", code], env=chosen, capture_output=True, text=True)
    assert run.stdout.split() == ["PCI_BUS_ID", "ACTIVE"]


def test_planning_and_the_command_line_do_not_import_torch() -> None:
    """The window opens, and `tandem plan` answers, without waiting seconds for torch."""
    code = (
        "import sys, pkgutil, importlib\n"
        f"for name in {TORCH_FREE}: importlib.import_module(name)\n"
        f"for name in {TORCH_FREE_PACKAGES}:\n"
        "    package = importlib.import_module(name)\n"
        "    for module in pkgutil.walk_packages(package.__path__, name + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "        if 'torch' in sys.modules: sys.exit(f'{module.name} imports torch')\n"
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_only_the_gpu_backend_and_link_trials_need_triton() -> None:
    """Models load on systems without Triton, such as macOS."""
    code = (
        "import sys, pkgutil, importlib, engine\n"
        "sys.modules['triton'] = None\n"
        "for module in pkgutil.walk_packages(engine.__path__, 'engine.'):\n"
        "    is_gpu = module.name.startswith('engine.backends.gpu')\n"
        "    if is_gpu or module.name.startswith('engine.runtime.interconnect.'): continue\n"
        "    importlib.import_module(module.name)\n"
        "import engine.runtime.interconnect.proof"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
