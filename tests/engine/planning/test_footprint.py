"""Working memory of a device, estimated from a header alone."""

from pathlib import Path

import pytest

from engine.backends.cpu.kernels.cache import attention_page
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import Declaration, declare
from engine.model.forward import state as attention_sizes
from engine.planning import plan as plans
from engine.planning.evaluation.evaluator import Evaluator
from engine.planning.footprint import GRAPH_BYTES, WorkingSizes, compute_bytes
from engine.planning.memory import LOADING_BYTES, link_bytes
from engine.planning.plan import Plan, make_plan
from tests.helpers.hollow import hollow_llama, hollow_moe

ROOM = {"cpu": 1 << 40, "cuda:0": 1 << 40, "cuda:1": 1 << 40}


@pytest.fixture(autouse=True)
def everywhere_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "uses_kernels", lambda device: True)


def planned(file: GGUFFile, *devices: str, **more: object) -> Plan:
    return make_plan(*declared(file, *devices, **more), ROOM)


def declared(file: GGUFFile, *devices: str, **more: object) -> tuple[Declaration, LoadParams]:
    params = LoadParams(str(file.path), devices, **{"n_ctx": 8192, **more})  # type: ignore[arg-type]
    return declare(file, params), params


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(hollow_llama(tmp_path_factory.mktemp("hollow") / "llama.gguf", n_layer=4))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("hollow") / "moe.gguf"
    return GGUFFile.open(hollow_moe(path, n_layer=4, n_embd=2048, n_head=32, n_ff_exp=768))


def test_weights_are_held_as_on_the_cpu(llama: GGUFFile) -> None:
    on_gpu, on_cpu = planned(llama, "cuda:0"), planned(llama, "cpu")
    assert on_gpu.storage == on_cpu.storage == "kernels"
    assert on_gpu.devices[0].memory.weights == on_cpu.devices[0].memory.weights


def test_gpus_among_themselves_need_room_to_meet(llama: GGUFFile) -> None:
    def computing(*devices: str, **more: object) -> list[int]:
        more = {"n_batch": 1, "draft": "off", **more}  # what loading takes is the larger part
        return [d.memory.compute for d in planned(llama, *devices, **more).devices]

    alone, two = computing("cuda:0"), computing("cuda:0", "cuda:1")
    assert two == [alone[0] + link_bytes(2)] * 2
    assert computing("cuda:0", "cuda:1", split=(1.0, 0.0)) == [*alone, 0]
    assert computing("cuda:0", "cuda:1", "cpu")[:2] == alone * 2, "the CPU's ranks meet otherwise"
    assert 16 << 20 < link_bytes(2) < link_bytes(8) < 40 << 20


def test_longer_batches_and_more_columns_take_more(llama: GGUFFile, moe: GGUFFile) -> None:
    def computing(file: GGUFFile, n_batch: int, *devices: str) -> int:
        return planned(file, *devices, n_batch=n_batch).devices[0].memory.compute

    for file in (llama, moe):
        sizes = [computing(file, n, "cuda:0") for n in (512, 1024, 2048, 4096)]
        assert sizes == sorted(sizes)
        assert computing(file, 4096, "cuda:0", "cuda:1") < sizes[-1]
    least = planned(llama, "cuda:0", n_batch=1, draft="off").devices[0].memory
    assert least.compute == LOADING_BYTES


def test_keys_on_the_host_are_met_in_chunks_on_the_device(llama: GGUFFile) -> None:
    plain = planned(llama, "cuda:0").devices[0].memory
    on_host = planned(llama, "cuda:0", kv_on_host=True).devices[0].memory
    assert on_host.compute > plain.compute
    assert on_host.host_kv == plain.kv


def test_a_rank_without_work_takes_nothing(llama: GGUFFile) -> None:
    declaration, _ = declared(llama, "cuda:0")
    assert compute_bytes(WorkingSizes(), declaration.hp, 512, 8192, "cuda:0", "kernels") == 0


def test_results_of_attention_are_as_large_as_kernels_write_them() -> None:
    for width in (1, 16, 17, 64, 80, 128, 576):
        assert attention_sizes.result_bytes(width) == attention_page.result_bytes(width)


def test_each_request_at_once_takes_more_on_the_cpu(llama: GGUFFile) -> None:
    """Passes of one token, of two and so on are recorded, each with its intermediate results."""
    one, two, four = (
        planned(llama, "cpu", parallel=n, draft="off").devices[0].memory.compute for n in (1, 2, 4)
    )
    assert 0 < two - one < four - two
    guessing = planned(llama, "cpu", parallel=2, draft_max=3).devices[0].memory.compute
    assert guessing == four, "guesses are rows as well"


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("kv_on_host", [False, True])
def test_quick_plans_say_the_same(
    llama: GGUFFile, moe: GGUFFile, devices: tuple[str, ...], kv_on_host: bool
) -> None:
    for file in (llama, moe):
        declaration, params = declared(file, *devices, kv_on_host=kv_on_host)
        quick = Evaluator(file).evaluate(params, ROOM).plan
        assert quick == make_plan(declaration, params, ROOM)


def test_a_file_of_a_models_size(tmp_path: Path) -> None:
    """An 8B in Q4_K_M with 8192 tokens of context takes about as much as elsewhere."""
    file = GGUFFile.open(hollow_llama(tmp_path / "8b.gguf"))
    found = planned(file, "cuda:0", n_batch=512)
    assert 5.0e9 < found.bytes_by_device()["cuda:0"] < 7.5e9
    assert 150e6 < found.devices[0].memory.compute < 500e6
    alone = planned(file, "cuda:0", n_batch=512, draft="off")
    guessed = found.devices[0].memory.compute - alone.devices[0].memory.compute
    assert 3 * GRAPH_BYTES < guessed < 5 * GRAPH_BYTES, "passes of two, four and eight rows"
