"""Checks at a load: right kernels pass; a wrong one is found, replaced, named and remembered."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine import EngineError, Model, load_model
from engine.backends.gpu import attention, elementwise, moe
from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.checks.rank_check import Verdicts
from engine.backends.gpu.decode.sampling import DeviceSampler
from engine.backends.gpu.launch.configs import allow_all, refuse, refused
from engine.backends.gpu.launch.kernel_launch import intercept_launches
from engine.backends.gpu.loading.dry_run import variant_of
from engine.backends.gpu.matmul import gemv, tile_gemm
from engine.backends.gpu.page_tables import PagedRows
from engine.backends.gpu.quantised import attached
from engine.backends.reference.backend import Backend
from engine.hardware import backend_choice
from engine.hardware.card_records import CardRecords
from tests.helpers.checked_rank import CPU, CheckedRank
from tests.helpers.golden import nmse
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import least_gguf, tiny_gguf

Q8_0 = int(Kind.Q8_0)
IDS = [5, 9]
Key = tuple[str | int, ...]


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    allow_all()
    yield
    allow_all()


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check of sampling, which takes longest to interpret."""
    monkeypatch.setattr("engine.backends.gpu.checks.comparison.SETTINGS", ())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return least_gguf(tmp_path_factory.mktemp("models") / "m.gguf")


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(
        tmp_path_factory.mktemp("models") / "moe.gguf", n_layer=1, n_embd=32, n_head=2, n_head_kv=2,
        n_ff=32, n_expert=4, quant="Q8_0",
    )  # fmt: skip


def one_by_one(model: Model) -> np.ndarray:
    """Return the logits after each of `IDS`, computed singly."""
    runner = model.runtime.runner
    rows = [forward_alone(runner, [t], n)[0] for n, t in enumerate(IDS)]
    return np.stack(rows)


def test_right_kernels_pass(path: Path) -> None:
    """Every variant that a pass or sampling a token launches has been launched."""
    rank, started = CheckedRank(path), set[object]()
    with intercept_launches(lambda start: not started.add(variant_of(start))):  # type: ignore[func-returns-value]
        n = rank.check()
    assert n == len(rank.calls.calls) + 1
    assert {variant_of(start) for start in rank.starts} <= started
    assert not refused(CPU)
    assert not rank.warnings
    assert not any(held.any() for cache in rank.cache.layers for held in cache.held())


@pytest.mark.usefixtures("no_drawing")
def test_right_experts_pass(moe_model: Path) -> None:
    rank = CheckedRank(moe_model, (1, 12)).only("assign", "experts", "sum_of_experts")
    assert len(rank.calls.calls) == 5
    rank.check()
    assert not refused(CPU)


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("split", [(3, 1), (1, 3)])
def test_a_slice_of_the_weights_passes(split: tuple[int, int], tmp_path: Path) -> None:
    """The check reads cuts inside a block and a super-block from the file."""
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1, n_ff=128, quant="Q8_0")
    options = {"devices": ("cuda:0", "cuda:1"), "split": split}
    rank = CheckedRank(path, (1,), 1, **options).only("linears", "matmul", "gated_linears")
    assert rank.check() == len(rank.calls.calls) + 1 > 3
    assert not refused(CPU)


def spoilt(result: Any) -> Any:
    """Spoil one row of a matrix in a product, or one number of another result."""
    if isinstance(result, Tensor):
        result[..., -1] *= -1
        result[..., -1] += 0.5
    elif result is not None:
        spoilt(next(x for x in result if x is not None))
    return result


def spoil(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str,
    when: Callable[..., bool] = lambda *_: True,
) -> None:  # fmt: skip
    """Make a function return wrong results from now on."""
    original = getattr(owner, name)

    def wrong(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        return spoilt(found) if when(*args) else found

    monkeypatch.setattr(owner, name, wrong)


def one_row(rows: Any, *_: object) -> bool:
    return bool(rows.n_row == 1)


def always(*_: object) -> bool:
    return True


def few(q: Tensor, *_: object) -> bool:
    return len(q) == 1


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(
    ("owner", "name", "when", "op", "wrong", "words"),
    [
        (gemv, "_launch_products", one_row, "linears", [("gemv", Q8_0, 1)],
         "products of 1 row with Q8_0 weights"),
        (gemv, "_launch_products", one_row, "matmul", [("gemv", Q8_0, 1)],
         "products of 1 row with Q8_0 weights"),
        (tile_gemm, "_multiply", always, "linears", [("tile_gemm", Q8_0, 16)],
         "products of up to 16 rows with Q8_0 weights"),
        (elementwise, "rope_all", always, "ropes", [("rope_all",)], "rope all"),
        (elementwise, "_norm", always, "rms_norm", [("rms_norm",)], "rms norm"),
        (attention, "attention", few, "new_attention", [("attention", "f16", 16, 1)],
         "attention over keys and values in f16"),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)  # fmt: skip
def test_what_is_wrong_is_found_and_replaced(
    owner: object, name: str, when: Callable[..., bool], op: str, wrong: list[Key], words: str,
    path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Just the wrong kernel is refused, and without it the same check passes."""
    spoil(monkeypatch, owner, name, when)
    rank = CheckedRank(path).only(op)
    rank.check()
    assert refused(CPU) == set(wrong)
    assert f"a check found wrong results for {words}" in rank.warnings
    again = CheckedRank(path).only(op)
    again.check()
    assert refused(CPU) == set(wrong)


@pytest.mark.usefixtures("no_drawing")
def test_a_wrong_cache_is_written_by_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens are written by a separate kernel."""
    original = attention.write

    def write(cache: Any, k: Tensor, v: Tensor | None, rows: PagedRows) -> bool:
        return original(cache, k, None if v is None else v * 1.1, rows)

    monkeypatch.setattr(attention, "write", write)
    rank = CheckedRank(path, (16,)).only("new_attention")
    rank.check()
    assert refused(CPU) == {("kv_write", "f16")}
    assert "wrong results for writing keys and values in f16" in rank.warnings


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(
    ("n", "name", "key"), [(1, "_planes_gemv", "expert_gemv"), (12, "_grouped_gemm", "expert_gemm")]
)
def test_wrong_experts_are_computed_one_by_one(
    n: int, name: str, key: str, moe_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, moe, name)
    rank = CheckedRank(moe_model, (n,)).only("experts")
    rank.check()
    assert refused(CPU) == {(key, Q8_0)}
    assert "experts' products for" in rank.warnings


@pytest.mark.usefixtures("no_drawing")
def test_wrong_experts_are_not_chosen(moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = moe.assign

    def assign(*args: Any) -> Any:
        found = original(*args)
        if found is not None:
            found[1].expert_of[0] = (found[1].expert_of[0] + 1) % 4
        return found

    monkeypatch.setattr(moe, "assign", assign)
    rank = CheckedRank(moe_model, (1,)).only("assign")
    rank.check()
    assert refused(CPU) == {("assign", 1)}


@pytest.mark.usefixtures("no_drawing")
def test_rows_that_a_norm_quantises_are_compared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next product reads them, whatever the norm's own result is."""
    original = elementwise.add_norm

    def add_norm(*args: Any) -> Any:
        found = original(*args)
        rows = None if found is None or found[1] is None else attached(found[1])
        if rows is not None:
            rows.numbers[..., 5] += 64
        return found

    monkeypatch.setattr(elementwise, "add_norm", add_norm)
    rank = CheckedRank(path, (1,)).only("add_norm")
    rank.check()
    assert refused(CPU) == {("add_norm",)}


def test_tokens_that_differ_are_drawn_by_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DeviceSampler.sample

    def sample(self: DeviceSampler, *args: Any) -> None:
        original(self, *args)
        args[1].add_(1)

    monkeypatch.setattr(DeviceSampler, "sample", sample)
    rank = CheckedRank(path).only()
    assert rank.check() == 1
    assert refused(CPU) == {("sampling",)}
    assert not GpuBackend(CPU, 1, 256).samples
    assert [found.kind for found in rank.fallbacks.current] == ["sampling"]


def test_ranks_draw_together(path: Path) -> None:
    options = {"devices": ("cuda:0", "cuda:1"), "split": (1, 1)}
    rank = CheckedRank(path, (1,), 0, **options).only()
    together, alone = rank.dry.drawings
    assert (len(together.slices), len(alone.slices)) == (2, 1), "several sequences are drawn alone"
    assert rank.check() == 2
    assert not refused(CPU)


@pytest.mark.usefixtures("no_drawing")
def test_wrong_planes_end_the_load_with_one_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel can correct weights that are wrong in memory."""
    rank = CheckedRank(path, (1,)).only("linears")
    for slot in rank.slots:
        if slot.tensor.name == "blk.0.attn_k.weight":
            getattr(slot.owner, slot.attribute).planes[-1, 7] ^= 0x30
    with pytest.raises(EngineError, match=r"^No kernel computes linears Q8_0 \w+ correctly"):
        rank.check()


@pytest.mark.usefixtures("no_drawing")
def test_verdicts_are_kept(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later load compares nothing but reports the same; another driver starts over."""
    spoil(monkeypatch, elementwise, "_norm")
    file = tmp_path / "cards.json"

    def checked(key: str) -> CheckedRank:
        allow_all()
        rank = CheckedRank(path, (1,)).only("rms_norm", "ropes")
        rank.n_made = rank.check(Verdicts(CardRecords(file), key))
        assert refused(CPU) == {("rms_norm",)}
        assert "wrong results for rms norm" in rank.warnings
        return rank

    assert checked("a card").n_made == 3
    assert checked("a card").n_made == 0
    assert checked("a card, another driver").n_made == 3
    assert checked("a card").n_made == 0


@pytest.mark.usefixtures("no_drawing")
def test_what_an_earlier_load_refused_is_reported_again(path: Path) -> None:
    """A second model in the same process does not even start the wrong kernel."""
    refuse(CPU, [("rms_norm",), ("gemv", 12, 1)])
    rank = CheckedRank(path, (1,)).only()
    rank.check()
    assert "wrong results for rms norm" in rank.warnings
    assert "Q4_K" not in rank.warnings


@pytest.mark.parametrize(
    "key",
    [("gemv", Q8_0, 1), pytest.param(("gated", Q8_0, 1), marks=pytest.mark.slow),
     ("attention", "f16", 16, 1), pytest.param(("rms_norm",), marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_answer_stays_right(key: Key, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model computes the same logits with a kernel replaced, if more slowly."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        expected = model.logits(IDS)
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
    refuse(CPU, [key])
    with load_model(path, n_ctx=32) as model:
        found = one_by_one(model)
    assert nmse(found, expected) < 1e-3


def test_where_no_kernel_is_right_torch_computes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's load is made again without kernels."""

    def fail(*_: object) -> None:
        raise EngineError("No kernel computes linears Q4_K correctly.")

    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
    monkeypatch.setattr(backend_choice, "_refused", {})
    monkeypatch.setattr(GpuBackend, "check", fail)
    with load_model(path, n_ctx=32) as model:
        assert type(model.runtime.ranks[0].backend) is Backend
    assert backend_choice.refused_kernels() == {"cpu": "No kernel computes linears Q4_K correctly"}


def test_a_load_that_compiles_checks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are not checked otherwise: that takes them many seconds."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=4) as model:
        expected = model.logits(IDS)
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
    spoil(monkeypatch, gemv, "_launch_products", one_row)
    with monkeypatch.context() as patch:
        patch.setattr("engine.runtime.model_runner.captures_tokens", lambda: False)
        with load_model(path, n_ctx=4):  # capturing tokens takes long
            assert not refused(CPU)
    monkeypatch.setattr(GpuBackend, "compiles", True)
    with load_model(path, n_ctx=4) as model:
        assert refused(CPU) == {("gemv", Q8_0, 1)}
        said = "a check found wrong results for products of 1 row with Q8_0 weights"
        assert any(said in warning for warning in model.warnings)
        found = one_by_one(model)
    assert nmse(found, expected) < 1e-3
