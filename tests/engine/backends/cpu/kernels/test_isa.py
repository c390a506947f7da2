"""The choice of an instruction set, and kernels without external symbols."""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding as llvm
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import ISAS, Isa, Neon, chosen, supported
from engine.backends.cpu.kernels.language.values import F16, F32, function
from engine.backends.cpu.kernels.products import int16_gemm
from engine.backends.cpu.kernels.running import jit
from engine.errors import EngineError
from tests.helpers.kernel_modules import LIKE_OTHERS, MODULES, unresolved
from tests.helpers.kernels import isa_named

V2 = ("cx16", "popcnt", "sahf", "sse4.1", "sse4.2", "ssse3")
V3 = (*V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
V4 = (*V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

X86 = [kind.name for kind in ISAS if kind is not Neon]
NEON = Neon()

LINUX, LINUX_ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
WINDOWS, WINDOWS_ARM = "x86_64-pc-windows-msvc", "aarch64-pc-windows-msvc"
MACOS, MACOS_ARM = "x86_64-apple-macosx10.15.0", "arm64-apple-macosx11.0.0"


UNIQUE = [name for name in MODULES if name not in LIKE_OTHERS]


def third(n: int) -> Container[str]:
    """Return every third module, from `n` on, without duplicates of others."""
    return UNIQUE[n::3]


def cases(triple: str, main: str, *others: str, quick: Container[str] = ()) -> list[Any]:
    """Return all modules for some instruction sets; marked slow except for the quick ones."""
    return [
        pytest.param(
            name, isa_named(isa), triple, id=f"{name}-{isa}-{triple}",
            marks=[]
            if isa == main and name in quick
            else [pytest.mark.slow],
        )
        for isa in dict.fromkeys([main, *others]) if isa for name in MODULES
    ]  # fmt: skip


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Reset the chosen instruction set before and after each test."""
    monkeypatch.delenv("TANDEM_CPU", raising=False)
    chosen.cache_clear()
    yield monkeypatch
    chosen.cache_clear()


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), ["generic"]),
        (("sse2", "ssse3"), ["generic"]),
        (V2, ["sse4", "generic"]),
        ((*V2, "avx"), ["sse4", "generic"]),
        (V3, ["avx2", "sse4", "generic"]),
        ((*V3, "avxvnni"), ["avxvnni", "avx2", "sse4", "generic"]),
        (V4, ["avx2", "sse4", "generic"]),
        ((*V4, "avx512vnni"), ["avx512", "avx2", "sse4", "generic"]),
        ((*V4, "avx512vnni", "avxvnni"), ["avx512", "avxvnni", "avx2", "sse4", "generic"]),
        ((*V4, "avx512vnni", "avx512bf16"), ["avx512", "avx2", "sse4", "generic"]),
        (("neon",), ["generic"]),
        (("neon", "dotprod"), ["neon", "generic"]),
    ],
)
def test_supported_instruction_sets_by_features(
    features: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr("platform.machine", lambda: "any")
    assert [isa.name for isa in supported()] == expected
    assert supported()[0].has_word_dots == (expected[0] == "avx512")


@pytest.mark.parametrize(
    ("system", "facts", "expected"),
    [
        ("darwin", "", "neon"),
        ("linux", "Features\t: fp asimd asimdhp asimddp lrcpc\n", "neon"),
        ("linux", "Features\t: fp asimd asimdhp\n", "generic"),
        ("linux", None, "generic"),
    ],
)
def test_arm_dot_products_are_detected(
    system: str, facts: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if facts is not None:
        path.write_text(facts)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"neon": True})
    monkeypatch.setattr("platform.machine", lambda: "arm64" if system == "darwin" else "aarch64")
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("engine.backends.cpu.kernels.language.isa.CPU_FACTS", path)
    assert supported()[0].name == expected


def test_the_best_instruction_set_is_chosen(fresh: pytest.MonkeyPatch) -> None:
    assert chosen().name == supported()[0].name


@pytest.mark.parametrize("name", [isa.name for isa in supported()])
def test_the_environment_can_choose_another(name: str, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TANDEM_CPU", name)
    assert chosen().name == name


@pytest.mark.parametrize("name", ["pentium", "AVX2", "neon avx2"])
def test_an_unknown_instruction_set_is_refused(name: str, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TANDEM_CPU", name)
    with pytest.raises(EngineError) as refusal:
        chosen()
    assert str(refusal.value) == f"TANDEM_CPU is '{name}', which this processor does not support."
    assert refusal.value.hint == f"Set it to one of {', '.join(i.name for i in supported())}."


def test_an_unsupported_instruction_set_is_refused(fresh: pytest.MonkeyPatch) -> None:
    names = {kind.name for kind in ISAS} - {isa.name for isa in supported()}
    assert names
    for name in names:
        fresh.setenv("TANDEM_CPU", name)
        with pytest.raises(EngineError):
            chosen()


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        (LINUX, {"cosf", "__extendhfsf2"}),
        (LINUX_ARM, {"cosf"}),
        (WINDOWS, {"cosf", "__extendhfsf2"}),
        (WINDOWS_ARM, {"cosf"}),
        (MACOS, {"cosf", "__extendhfsf2"}),
        (MACOS_ARM, {"cosf"}),
    ],
)
def test_unresolved_symbols_are_detected(triple: str, expected: set[str]) -> None:
    assert unresolved(jit.object_file(isa_named("generic"), _build_needy, triple)) == expected


def _build_needy(module: ir.Module) -> None:
    """Write `needy(address)`: a cosine and a conversion that some processors lack."""
    code, (address,) = function(module, "needy", 1)
    code.store(code.unary("cos", code.load(address, F32)), address)
    code.store(code.load(address + 4, F16).to(F32), address + 8)
    code.builder.ret_void()


@pytest.mark.parametrize(
    ("name", "isa", "triple"),
    [
        *cases(LINUX, "generic", *X86, quick=third(0)),
        *cases(LINUX_ARM, "neon", "generic", quick=third(1)),
        *cases(WINDOWS, "avx2", *X86, quick=third(2)),
        *cases(WINDOWS_ARM, "", "neon"),
        *cases(MACOS_ARM, "neon", quick=("product-Q4_K", "store-f16", "rope")),
        *cases(MACOS, "", "avx2", "avx512"),
    ],
)
def test_kernels_have_no_unresolved_symbols(name: str, isa: Isa, triple: str) -> None:
    given = {"__chkstk"} if triple == WINDOWS else set()  # see `jit`
    assert unresolved(jit.object_file(isa, MODULES[name](isa), triple)) <= given


def test_kernels_do_not_use_register_x18() -> None:
    texts = [
        jit.assembly(NEON, MODULES["product-IQ4_NL"](NEON), triple)
        for triple in (LINUX_ARM, WINDOWS_ARM)
    ]
    assert [bool(re.search(r"\b[wx]18\b", text)) for text in texts] == [True, False]


@pytest.mark.parametrize("kind", ["IQ4_NL", pytest.param("Q4_K", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "wanted", "unwanted"),
    [
        ("avx512", ["vpdpbusd", "%zmm", "vpshufb"], []),
        ("avxvnni", ["{vex}\tvpdpbusd", "%ymm", "vpshufb"], ["%zmm", "%xmm16"]),
        ("avx2", ["vpmaddubsw", "%ymm", "vpshufb", "vfmadd"], ["%zmm", "vpdpbusd"]),
        ("sse4", ["pmaddubsw", "pshufb"], ["%ymm", "\tv", "vfmadd"]),
        ("generic", ["pmaddwd"], ["%ymm", "\tv", "pshufb", "pmaddubsw"]),
    ],
)
def test_products_use_the_expected_instructions(
    name: str, wanted: list[str], unwanted: list[str], kind: str
) -> None:
    isa = isa_named(name)
    text = jit.assembly(isa, MODULES[f"product-{kind}"](isa), LINUX)
    wanted = [part for part in wanted if kind == "IQ4_NL" or "shufb" not in part]  # for its table
    assert [part for part in wanted if part not in text] == []
    assert [part for part in unwanted if part in text] == []


def test_int16_products_use_vpdpwssd() -> None:
    isa = isa_named("avx512")
    text = jit.assembly(isa, lambda m: int16_gemm.build(m, isa), LINUX)
    assert "vpdpwssd" in text
    assert "vpmaddwd" not in text


@pytest.mark.parametrize("triple", [LINUX_ARM, pytest.param(MACOS_ARM, marks=pytest.mark.slow)])
def test_products_on_arm_multiply_four_bytes_at_once(triple: str) -> None:
    text = jit.assembly(NEON, MODULES["product-IQ4_NL"](NEON), triple)
    assert "sdot" in text
    assert "tbl" in text
    assert "fcvtl" in text  # F16 by an instruction
