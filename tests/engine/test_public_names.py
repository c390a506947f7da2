"""What `import engine` offers, and what it does not cost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine

PACKAGE = Path(engine.__file__).parent
TORCH_FREE = [
    "engine",
    "engine.config",
    "engine.devices",
    "engine.errors",
    "engine.events",
    "engine.gguf",
    "engine.host",
    "engine.models.info",
    "engine.models.declare",
    "engine.models.registry",
    "engine.planning.plan",
    "engine.sampling.sampler",
    "engine.text",
    "engine.generation.scoring",
    "engine.planning.token_work",
    "engine.measuring.benchmark",
    "engine.planning.speed.calibration",
    "engine.planning.speed.forecast",
    "engine.planning.speed.machine_file",
    "engine.planning.speed.rigs",
    "app.__main__",
]


@pytest.mark.parametrize("name", engine.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(engine, name) is not None


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
    """So that the window opens, and `tandem plan` answers, without waiting seconds for it."""
    code = f"import sys, {', '.join(TORCH_FREE)}\n"
    code += "engine.models.registry.supported_architectures()\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
