"""Evaluations from looked-up costs equal those of the whole model, and are quick."""

import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LoadParams, Planner
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.declare import declare
from engine.planning.evaluation.evaluator import Evaluation, Evaluator
from engine.planning.evaluation.workload import ModelWorkload
from engine.planning.footprint import held_bytes
from engine.planning.threads import work_of
from tests.helpers.golden import golden_models, golden_path
from tests.helpers.hollow import hollow_moe
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.plans import assert_as_declared, questions
from tests.helpers.tiny_gguf import tiny_gguf

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
GPUS = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def routed(path: Path) -> Path:
    """Write a model of three blocks, the last two with experts and a shared one."""
    draft = ModelDraft.read(tiny_gguf(path, n_layer=3, n_head=8, n_head_kv=4, n_ff=172))
    draft = draft.changed(
        {"general.architecture": "qwen2moe"}
        | {k.replace("llama.", "qwen2moe."): v for k, v in draft.meta.items() if "llama." in k}
        | {k: None for k in draft.meta if k.startswith("llama.")}
        | {"qwen2moe.expert_count": 4, "qwen2moe.expert_used_count": 2}
    )
    sizes = {
        "ffn_gate_inp": (4, 64), "ffn_gate_inp_shexp": (64,),
        "ffn_gate_exps": (4, 96, 64), "ffn_up_exps": (4, 96, 64), "ffn_down_exps": (4, 64, 96),
        "ffn_gate_shexp": (160, 64), "ffn_up_shexp": (160, 64), "ffn_down_shexp": (64, 160),
    }  # fmt: skip
    for layer in (1, 2):
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            del draft.tensors[f"blk.{layer}.{name}.weight"]
        for name, shape in sizes.items():
            values = np.ones(shape, np.float32)
            draft.tensors[f"blk.{layer}.{name}.weight"] = DraftTensor.of(values)
    for layer in range(3):
        for part, n in (("q", 64), ("k", 32), ("v", 32)):
            draft.tensors[f"blk.{layer}.attn_{part}.bias"] = DraftTensor.of(np.ones(n, np.float32))
    return draft.write(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[GGUFFile, Evaluator]]:
    folder = tmp_path_factory.mktemp("models")
    paths = [
        routed(folder / "routed.gguf"),
        tiny_gguf(folder / "q.gguf", n_layer=5, n_head=8, n_head_kv=4, n_ff=300, quant="Q8_0"),
        tiny_gguf(folder / "one.gguf", arch="qwen3", n_head_kv=1, qk_norm=True, tied=True),
        tiny_gguf(folder / "bits.gguf", arch="bitnet", head_dim=24),
        tiny_gguf(folder / "bias.gguf", arch="qwen2", n_layer=3, qkv_bias=True, quant="F16"),
        hollow_moe(folder / "moe.gguf", n_layer=5, n_embd=512, n_head=16, n_vocab=500),
    ]
    files = [GGUFFile.open(path) for path in paths]
    return [(file, Evaluator(file)) for file in files]


@FEW
@given(data=st.data())
@pytest.mark.parametrize("index", range(6))
def test_a_plan_is_the_declared_one(
    models: list[tuple[GGUFFile, Evaluator]], index: int, data: st.DataObject
) -> None:
    file, evaluator = models[index]
    assert_as_declared(file, evaluator, data.draw(questions(str(file.path))))


@settings(FEW, max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("name", golden_models())
def test_a_plan_of_each_architecture_is_the_declared_one(name: str, data: st.DataObject) -> None:
    path = golden_path(f"{name}.gguf")
    if path not in KNOWN:
        file = GGUFFile.open(path)
        KNOWN[path] = file, Evaluator(file)
    assert_as_declared(*KNOWN[path], data.draw(questions(str(path))))


KNOWN: dict[Path, tuple[GGUFFile, Evaluator]] = {}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Return the planner of a model of 80 blocks with 128 experts."""
    return Planner(hollow_moe(tmp_path_factory.mktemp("large") / "m.gguf"))


def drag(planner: Planner, x: float) -> Evaluation:
    """Evaluate a split with the second of three handles at x."""
    params = LoadParams(planner.info.path, GPUS, (0.1, x - 0.1, 0.8 - x, 0.2), n_ctx=8192)
    return planner.evaluate(params, dict.fromkeys(GPUS, 80 << 30))


def test_an_evaluation_fits_into_a_frame(large: Planner) -> None:
    """Each position is new. Time in which the machine does something else does not count."""
    drag(large, 0.2)
    seconds = []
    for step in range(20):
        start = time.thread_time()
        drag(large, 0.21 + 0.0237 * step)
        seconds.append(time.thread_time() - start)
    assert statistics.median(seconds) < 0.012


def test_blocks_that_are_alike_count_once(large: Planner) -> None:
    load = drag(large, 0.5).load
    assert sum(block.count for block in load.blocks) == 2 * 80, "a mixer and an FFN each"
    assert len(load.blocks) < 60
    assert len({block.group for block in load.blocks}) == 1
    endings = [block for block in load.blocks if block.is_ending]
    assert [block.count for block in endings] == [1], "the last block's FFN"


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_the_ranks_together_do_a_tokens_work(
    models: list[tuple[GGUFFile, Evaluator]], mode: str
) -> None:
    """Matrices that all ranks hold count once for each."""
    for file, evaluator in models:
        params = LoadParams(str(file.path), ("cpu",) * 2, (2, 1), split_mode=mode)
        work = work_of(declare(file, LoadParams(str(file.path))))
        load = evaluator.evaluate(params).load
        routers = total(load, "flop") - work.n_flop
        assert 0 <= routers <= 2 * 4 * 128 * 512 * 5
        assert sum(rank.flop for rank in load.head.values()) == work.n_head_flop
        if mode == "layer":
            assert routers == 0
            assert len({block.group for block in load.blocks}) == 2


def total(load: ModelWorkload, name: str) -> float:
    """Return the sum of a field over all blocks and ranks, and the embedding's."""
    blocks = sum(
        block.count * sum(getattr(rank, name) for rank in block.ranks.values())
        for block in load.blocks
    )
    return blocks + sum(getattr(rank, name) for rank in load.embedding.values())


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_dense_model_reads_what_it_holds_but_for_the_embedding(
    models: list[tuple[GGUFFile, Evaluator]], device: str
) -> None:
    """It reads one row of the embedding."""
    file, evaluator = models[1]
    params = LoadParams(str(file.path), (device,) * 3, (3, 2, 1))
    found = evaluator.evaluate(params)
    storage = found.plan.devices[0].storage
    rows = [slot for slot in declare(file, params).slots if slot.tensor.name == "token_embd.weight"]
    skipped = sum(held_bytes(slot, rank, storage) for slot in rows for rank in range(3))
    read = total(found.load, "read_bytes") + sum(r.read_bytes for r in found.load.head.values())
    held = sum(d.memory.weights for d in found.plan.devices)
    assert read == pytest.approx(held - skipped + rows[0].tensor.row_bytes)


def test_a_token_reads_only_its_experts(models: list[tuple[GGUFFile, Evaluator]]) -> None:
    file, evaluator = models[0]
    load = evaluator.evaluate(LoadParams(str(file.path), ("cuda:0",))).load
    dense, sparse, last = load.blocks[1], load.blocks[-2], load.blocks[-1]
    assert (dense.count, sparse.count) == (1, 1)
    assert last == replace(sparse, is_ending=True)
    assert dense.ranks[0].batch_bytes == 0
    experts, shared, router, vectors = 4 * 3 * 96 * 64 * 4, 3 * 160 * 64 * 4, 4 * 64 * 4, 2 * 64 * 4
    rest = shared + router + vectors + 64 * 4
    assert sparse.ranks[0].read_bytes == experts / 2 + rest
    assert sparse.ranks[0].batch_bytes == experts + rest
    assert sparse.ranks[0].n_op == 7


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0/q4_0"])
def test_keys_and_values_are_read_as_they_are_held(tmp_path: Path, kv_type: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=3, n_head=8, n_head_kv=4, head_dim=32)
    params = LoadParams(str(path), ("cuda:0",) * 2, (1, 3), n_ctx=512, kv_type=kv_type)
    found = Planner(path).evaluate(params)
    for rank in range(2):
        read = sum(b.count * b.ranks[rank].kv_bytes for b in found.load.blocks)
        assert read * 512 == found.plan.devices[rank].memory.kv
        flop = sum(b.count * b.ranks[rank].kv_flop for b in found.load.blocks)
        assert flop == 3 * (2, 6)[rank] * 2 * 64
