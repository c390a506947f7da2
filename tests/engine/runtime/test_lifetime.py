"""Lifetime of models: what is freed and when, and what a failure leaves behind."""

import gc
import platform
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine import Cancelled, EngineError, Model, SamplingParams, load_model
from engine.backends.cpu.thread_comm import ThreadCommunicator, ThreadGroup
from engine.backends.reference.weights import DenseWeight
from engine.hardware.torch_devices import trim_heap
from engine.parallel.rank_threads import RankThreads
from engine.runtime.loader import ByteProgress
from tests.helpers.prepared_templates import wait_for_templates
from tests.helpers.tiny_gguf import tiny_gguf

RANKS = [1, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "m.gguf")


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable garbage collection, as in the window, where it runs only now and then."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def matrices() -> int:
    return sum(type(thing) is DenseWeight for thing in gc.get_objects())


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("n", RANKS)
def test_a_failed_load_frees_its_weights_though_the_error_is_kept(
    path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, n_calls = matrices(), 0
    original = ByteProgress.add

    def add(self: ByteProgress, n_bytes: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 8:
            raise Cancelled("Loading")
        original(self, n_bytes)

    monkeypatch.setattr(ByteProgress, "add", add)
    with pytest.raises(Cancelled) as kept:
        load_model(path, ["cpu"] * n)
    kept.value.__traceback__ = None
    del kept
    assert matrices() == before


@pytest.mark.parametrize("n", RANKS)
def test_a_dropped_model_is_freed_with_its_threads(path: Path, n: int) -> None:
    wait_for_templates()
    threads = threading.active_count()
    model = load_model(path, ["cpu"] * n)
    model.logits([5, 6])
    wait_for_templates()
    alive = weakref.ref(model.runtime)
    del model
    gc.collect()
    assert alive() is None
    assert threading.active_count() == threads


def test_what_was_freed_in_small_pieces_goes_back_to_the_system() -> None:
    """The C library would keep freed memory that lies between pieces still in use."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only the GNU C library is asked to")
    process = psutil.Process()
    pieces = [torch.ones(16 << 10) for _ in range(2000)]
    full = process.memory_info().rss
    kept = pieces[::20]
    del pieces
    trim_heap()
    assert full - process.memory_info().rss > 60 << 20
    assert len(kept) == 100


def test_a_closed_model_says_so(path: Path) -> None:
    model = load_model(path)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="unloaded"):
        model.logits([5])


def test_collectives_keep_no_history() -> None:
    group = ThreadGroup()
    comms = [ThreadCommunicator(group, rank, torch.device("cpu")) for rank in range(2)]
    pool = RankThreads(2, group.abort, lambda: None)

    for _ in range(50):
        pool.call_on_all(lambda rank: comms[rank].all_reduce(torch.ones(2), (0, 1)) is None)
        group.settle()
    assert len(group._barriers) == 1
    assert group.barrier((0, 1)).slots == ([None, None], [None, None])
    pool.close()


def test_the_cause_of_a_failed_load_is_not_taken_for_a_cancel(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are cancelled then; their errors must not hide the first one."""
    from engine.runtime import loader as builder

    original = builder.Cache
    tripped = threading.Event()

    def fail_on_one(states: object, rank: int, *rest: object, **options: object) -> object:
        if rank == 1:
            tripped.set()
            raise MemoryError
        tripped.wait(5)
        return original(states, rank, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builder, "Cache", fail_on_one)
    for _ in range(10):
        tripped.clear()
        with pytest.raises(EngineError, match="needed to load the model"):
            load_model(path, ["cpu"] * 3)


def test_useless_logits_do_not_poison_the_next_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_model(path, kv_type="f32") as model:
        expected = generated(model)
        weight = model.runtime.ranks[0].model.blk[0].attn_norm.weight
        assert weight is not None
        good = weight.clone()
        with torch.inference_mode():
            weight.fill_(torch.nan)
        with pytest.raises(EngineError, match="no usable prob"):
            generated(model)
        with torch.inference_mode():
            weight.copy_(good)
        assert generated(model) == expected


def generated(model: Model) -> list[int]:
    return [i for event in model.generate([5, 6, 7], GREEDY) for i in getattr(event, "ids", ())]


def test_a_rendered_template_begins_once(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    extra = {"tokenizer.ggml.add_eos_token": True}
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=template, extra=extra)
    with load_model(path) as model:
        text = model.chat_template.render([{"role": "user", "content": "hello"}])
        list(model.generate(text, SamplingParams(max_tokens=1)))
        ids = model.scheduler.last
        assert ids.count(model.tokenizer.bos_id) == 1
        assert model.tokenizer.eos_id not in ids
        list(model.generate("hello", SamplingParams(max_tokens=1)))
        assert model.scheduler.last[0] == model.tokenizer.bos_id
        assert model.scheduler.last[-1] != model.tokenizer.eos_id
