"""All kernels compile without a GPU; see `python -m tests.engine.backends.gpu.targets`."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.backends.gpu
from tests.engine.backends.gpu.offline import run_offline
from tests.engine.backends.gpu.targets import QUICK, SWEEP, half_of, kernel_name


def compiled(*arguments: str) -> dict[str, Any]:
    """Return the results of compiling, which are kept with pytest's own cache."""
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    return dict(
        run_offline("tests.engine.backends.gpu.targets", *arguments, TRITON_CACHE_DIR=folder)
    )


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    """Compile one variant of each kernel, half of them for AMD's target and half for NVIDIA's."""
    return compiled("--json", "--half", "1", *reversed(QUICK))


@pytest.mark.slow
def test_every_kernel_compiles_for_nvidia_and_for_amd() -> None:
    assert compiled("--json", *QUICK)["wrong"] == []


def test_every_kernel_compiles_for_nvidia_or_amd(quick: dict[str, Any]) -> None:
    """The other half of each is compiled by the oldest Triton, in CI."""
    assert quick["wrong"] == []
    assert {usage["target"] for usage in quick["kernels"]} == set(QUICK)


def test_every_kernel_that_is_started_is_among_them(quick: dict[str, Any]) -> None:
    assert set(started_kernels()) - set(quick["started"]) == set(), (
        "add it to tests/engine/backends/gpu/scenes.py"
    )


def test_kernels_of_before_volta_have_no_memory_orders() -> None:
    """Nor hints for the L1 cache: ptxas rejects them for sm_61."""
    kernels = "gemv.products|one_shot.all_reduce|sharded_sampling.offer"
    found = compiled("--json", "--only", kernels, "sm_61")
    assert found["wrong"] == []
    assert len(found["kernels"]) == 3


def test_two_halves_are_the_whole_for_each_target() -> None:
    """In CI the oldest Triton compiles one of them, and the newest the other."""
    kernels = [
        SimpleNamespace(__name__=name, __module__="engine.backends.gpu.kernels.x")
        for name in "abcde"
    ]
    starts: Any = [SimpleNamespace(kernel=kernel, constants={}) for kernel in kernels]
    for target in range(4):
        halves = [half_of(starts, half, target) for half in (0, 1)]
        assert all(halves)
        assert sorted(map(kernel_name, [*halves[0], *halves[1]])) == [f"x.{x}" for x in "abcde"]
    by_oldest = [half_of(starts, 0, target) for target in range(2)]
    assert len(by_oldest[0]) + len(by_oldest[1]) == len(starts), "each for every other target"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", SWEEP)
def test_all_variants_compile(target: str) -> None:
    assert compiled("--json", "--all", target)["wrong"] == []


def started_kernels() -> Iterator[str]:
    """Return names such as "norm.norm": kernels that modules of `engine.backends.gpu` launch."""
    package = Path(engine.backends.gpu.__file__).parent
    jitted = {path.stem: set(_jitted(path)) for path in (package / "kernels").glob("*.py")}
    for path in package.rglob("*.py"):
        if path.parent.name == "kernels":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "engine.backends.gpu.kernels":
                modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id, "")
                if node.attr in jitted.get(module, ()):
                    yield f"{module}.{node.attr}"


def _jitted(path: Path) -> Iterator[str]:
    """Return the functions of a file that Triton compiles."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and "jit" in map(_name, node.decorator_list):
            yield node.name


def _name(decorator: ast.expr) -> str:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return call.attr if isinstance(call, ast.Attribute) else ""
