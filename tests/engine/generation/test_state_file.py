"""State files: saved and loaded on any split; bad files change nothing."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from engine import (
    Cancelled,
    ContextOverflow,
    EngineError,
    Finished,
    Model,
    SamplingParams,
    StateFileError,
    StateProgress,
    load_model,
)
from engine.generation import state_strips
from engine.model.forward.batch import Piece
from tests.helpers.answers import ask
from tests.helpers.control_vector import write_control_vector
from tests.helpers.hf_models import FAMILIES
from tests.helpers.tiny_gguf import tiny_gguf

PROMPT = list(range(5, 17))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", n_layer=3, n_head=8, n_head_kv=4, head_dim=32)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """Yield a model on three ranks; each test fills its cache anew."""
    with load_model(path, ["cpu"] * 3, [3, 1, 2], n_ctx=64, parallel=3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (family,) = (f for f in FAMILIES if f.name == "jamba")
    path = tmp_path_factory.mktemp("recurrent") / "m.gguf"
    family.build(path)
    return path


@pytest.fixture
def saved(model: Model, tmp_path: Path) -> Path:
    """Return a saved state of an answer, from a model whose cache holds something else by now."""
    model.logits([1])
    ask(model, PROMPT, 5)
    model.save_state(tmp_path / "chat.state")
    model.scheduler.forget()
    model.logits([9, 8, 7])
    return tmp_path / "chat.state"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the JSON of a file, and the bytes behind it."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def rewrite(
    path: Path, change: Callable[[dict[str, Any]], object], data: bytes | None = None
) -> None:
    table, behind = header_of(path)
    change(table)
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + (behind if data is None else data))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0", "q8_0/q4_0"])
def test_what_three_ranks_saved_continues_on_one_and_on_two(
    path: Path, tmp_path: Path, kv_type: str
) -> None:
    file = tmp_path / "state"
    with load_model(path, ["cpu"] * 3, [3, 1, 2], kv_type=kv_type, n_ctx=64) as model:
        first, _ = ask(model, PROMPT, 5)
        turn = PROMPT + first + [20, 21]
        told = model.save_state(file)
        expected, n_kept = ask(model, turn, 8)
        logits = model.logits(turn)[-1]
    assert told.path == str(file)
    assert told.n_tokens == n_kept == len(PROMPT) + 4, "the last sampled token was not computed"
    assert told.n_bytes == file.stat().st_size
    for split in ([1], [1, 1], [0, 5, 1]):
        with load_model(path, ["cpu"] * len(split), split, kv_type=kv_type, n_ctx=64) as model:
            assert model.load_state(file).ids == tuple(turn[: told.n_tokens])
            assert ask(model, turn, 8) == (expected, n_kept)
            assert np.abs(model.logits(turn)[-1] - logits).max() < 5e-2


def test_others_can_read_it(model: Model, saved: Path) -> None:
    """The format is that of safetensors, without a thing of our own."""
    tensors = load_file(saved)
    n = len(PROMPT) + 4
    assert tensors["tokens"].tolist()[: len(PROMPT)] == PROMPT
    assert {name: t.shape for name, t in tensors.items() if name != "tokens"} == {
        f"{layer}.{name}": (4, n, 32) for layer in range(3) for name in "kv"
    }
    model.load_state(saved)
    held = [r.context.cache.tensors(r.states[1]).get("k") for r in model.runtime.ranks]
    heads = [k[:, :n] for k in held if k is not None]
    assert np.array_equal(tensors["1.k"], np.concatenate(heads))


def test_the_last_position_of_a_prompt_is_computed_and_no_other(model: Model, saved: Path) -> None:
    loaded = model.load_state(saved)
    assert ask(model, list(loaded.ids), 2)[1] == len(loaded.ids) - 1


def test_an_answer_goes_on_beside_a_loaded_state(model: Model, saved: Path) -> None:
    answer = model.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    next(answer), next(answer)
    model.load_state(saved)
    rest = list(answer)
    assert ask(model, PROMPT, 1)[1] == len(PROMPT) - 1, "both are cached"
    assert isinstance(rest[-1], Finished)


def test_progress_ends_at_the_whole(model: Model, saved: Path) -> None:
    for act in (model.load_state, model.save_state):
        seen: list[StateProgress] = []
        act(saved, on_progress=seen.append)
        assert len(seen) > 5
        assert seen[-1].done_bytes == seen[-1].total_bytes > 0
        assert [s.done_bytes for s in seen] == sorted(s.done_bytes for s in seen)


def test_what_is_cached_already_is_not_read(path: Path, tmp_path: Path) -> None:
    with load_model(path, n_ctx=512) as model:
        ask(model, PROMPT, 5)
        told = model.save_state(tmp_path / "state")
        read: list[object] = []
        ids = model.load_state(tmp_path / "state", on_progress=read.append).ids
        assert len(ids) == told.n_tokens
        assert not read
        model.scheduler.forget()
        assert model.load_state(tmp_path / "state", on_progress=read.append).ids == ids
        assert read


def test_the_first_tokens_are_a_state_too(path: Path, saved: Path, tmp_path: Path) -> None:
    with load_model(path, ["cpu"] * 2, n_ctx=64) as model:
        assert model.load_state(saved, n_tokens=9).ids == tuple(PROMPT[:9])
        expected = ask(model, PROMPT, 4)
        assert expected[1] == 9
        model.load_state(saved)
        assert model.save_state(tmp_path / "first", stop=9).n_tokens == 9
        assert model.n_cached > 9, "the rest is still there"
        model.logits([3])
        assert model.load_state(tmp_path / "first").ids == tuple(PROMPT[:9])
        assert ask(model, PROMPT, 4) == expected


def test_what_came_later_can_be_saved_by_itself(
    path: Path, model: Model, saved: Path, tmp_path: Path
) -> None:
    whole = model.load_state(saved).ids
    model.save_state(tmp_path / "first", stop=7)
    later = model.save_state(tmp_path / "later", start=7)
    assert later.n_bytes < saved.stat().st_size - 7 * 3 * 2 * 4 * 32
    with load_model(path, ["cpu"] * 2, n_ctx=64) as model:
        with pytest.raises(StateFileError, match="begins after token 7") as refused:
            model.load_state(tmp_path / "later")
        assert refused.value.hint == "Load the state of the earlier tokens first."
        model.load_state(tmp_path / "first")
        assert model.load_state(tmp_path / "later").ids == whole
        model.save_state(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


def test_a_shorter_context_takes_what_it_holds(path: Path, saved: Path) -> None:
    with load_model(path, n_ctx=10) as model:
        assert model.load_state(saved).ids == tuple(PROMPT[:10])
        assert ask(model, PROMPT[:8], 2)[1] == 7


def test_nothing_in_the_cache_is_nothing_to_save(path: Path, tmp_path: Path) -> None:
    with load_model(path) as model:
        with pytest.raises(StateFileError, match="no tokens from 0 to 0") as refused:
            model.save_state(tmp_path / "none")
        assert refused.value.hint == "Ask the model something first."
        model.logits([5, 6])
        with pytest.raises(StateFileError, match="no tokens from 2 to 2"):
            model.save_state(tmp_path / "none", start=2)
    assert not list(tmp_path.iterdir())


def test_recurrent_states_go_whole_or_not_at_all(recurrent: Path, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with load_model(recurrent, ["cpu"] * 3, n_ctx=64) as model:
        expected, _ = ask(model, PROMPT, 5)
        told = model.save_state(file)
        for part in ({"stop": 5}, {"start": 5}):
            with pytest.raises(StateFileError, match="recurrent state, so its state can only"):
                model.save_state(tmp_path / "part", **part)
        go_on, n_kept = ask(model, PROMPT + expected, 6)
    with load_model(recurrent, ["cpu"] * 2, [1, 3], n_ctx=64) as model:
        with pytest.raises(StateFileError, match="can only be loaded as a whole") as refused:
            model.load_state(file, n_tokens=5)
        assert refused.value.hint == f"Load all {told.n_tokens} tokens."
        model.load_state(file)
        assert ask(model, PROMPT + expected, 6) == (go_on, n_kept)
        model.load_state(file)
        assert ask(model, PROMPT, 5) == (expected, len(PROMPT) - 1), "it can go back, too"
    with load_model(recurrent, n_ctx=told.n_tokens - 1) as model:
        with pytest.raises(ContextOverflow):
            model.load_state(file)
        assert ask(model, PROMPT, 2)[1] == 0


LONG = list(range(5, 25)) * 30
"""600 tokens, for which a context of 700 has just the pages."""

OTHER = list(range(25, 5, -1)) * 17


@pytest.mark.parametrize("kind", ["path", "recurrent"])
def test_a_file_stays_where_pages_are_gone(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    file, less = tmp_path / "state", tmp_path / "less"
    with load_model(request.getfixturevalue(kind), ["cpu"] * 2, n_ctx=700) as model:
        answer, _ = ask(model, LONG, 5)
        ids = LONG + answer
        n_first = model.save_state(file, ids=ids).n_tokens
        whole = file.read_bytes()
        ask(model, OTHER, 1)
        told = model.save_state(file, ids=ids)
        assert (told.n_tokens, told.n_bytes) == (n_first, len(whole))
        assert file.read_bytes() == whole
        with pytest.raises(StateFileError, match="no tokens"):
            model.save_state(file, ids=[99, *ids])
        assert file.read_bytes() == whole
        model.load_state(file)
        assert ask(model, [*ids, 20], 1)[1] == n_first
        ask(model, OTHER, 1)
        assert model.save_state(less, ids=OTHER + LONG).n_tokens == len(OTHER)
        assert model.save_state(file).n_tokens == len(OTHER), "of another sequence"


def test_what_is_left_goes_to_a_file_that_has_less(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with load_model(path, n_ctx=700) as model:
        ask(model, LONG, 1)
        for n in (100, 560):
            assert model.save_state(file, stop=n).n_tokens == n
        ask(model, OTHER, 1)
        assert model.save_state(file, ids=LONG).n_tokens == 560
        assert model.save_state(file, ids=LONG, stop=100).n_tokens == 100, "all of it is there"
        n_left = model.save_state(file, ids=LONG).n_tokens
        assert 100 < n_left < 560
        file.write_bytes(file.read_bytes()[:-1])
        assert model.save_state(file, ids=LONG).n_tokens == n_left, "the damaged one is replaced"


@pytest.mark.parametrize(("kind", "kv_type"), [("path", "q8_0/f16"), ("recurrent", "f16")])
@pytest.mark.parametrize("strip_bytes", [1, 1000])
def test_strips_of_any_size_make_the_same_file_and_state(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
    kv_type: str, strip_bytes: int,
) -> None:  # fmt: skip
    file, again = tmp_path / "state", tmp_path / "again"
    model_file = request.getfixturevalue(kind)
    with load_model(model_file, ["cpu"] * 2, [1, 2], n_ctx=64, kv_type=kv_type) as model:
        ask(model, PROMPT, 5)
        model.save_state(file)
        monkeypatch.setattr(state_strips, "STRIP_BYTES", strip_bytes)
        model.save_state(again)
    assert again.read_bytes() == file.read_bytes()
    with load_model(model_file, ["cpu"] * 3, n_ctx=64, kv_type=kv_type) as model:
        model.load_state(file)
        monkeypatch.undo()
        model.save_state(again)
        assert again.read_bytes() == file.read_bytes()
        if kind == "path":
            model.scheduler.forget()
            monkeypatch.setattr(state_strips, "STRIP_BYTES", strip_bytes)
            assert model.load_state(file, n_tokens=9).ids == tuple(PROMPT[:9])
            model.save_state(again)
            assert load_file(again)["2.k"].tobytes() == load_file(file)["2.k"][:, :9].tobytes()


class CountedCopies(TorchDispatchMode):
    """Counter of copies between tensors, and of tensors converted or moved to another device."""

    n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.n += func._schema.name in ("aten::copy_", "aten::_to_copy", "aten::clone")
        return func(*args, **(kwargs or {}))


def n_steps(act: Callable[..., object], file: Path) -> tuple[int, int]:
    """Return how many reads or writes an act reports, and how many copies of tensors it makes."""
    seen: list[StateProgress] = []
    with CountedCopies() as copies:
        act(file, on_progress=seen.append)
    return len(seen), copies.n


def test_heads_and_channels_are_not_copied_one_by_one(recurrent: Path, tmp_path: Path) -> None:
    """What is read for each tensor and rank at once took 0.7 s of a restart, unit by unit."""
    file, n_ranks = tmp_path / "state", 3
    with load_model(recurrent, ["cpu"] * n_ranks, n_ctx=64) as model:
        ask(model, PROMPT, 5)
        model.save_state(file)
        n_tensors = len(header_of(file)[0]) - 1
        n_units = sum(t.shape[0] for t in load_file(file).values())
        assert n_units > 20 * n_tensors, "there are many to read one by one"
        for act in (model.save_state, model.load_state):
            n_parts, n_copies = n_steps(act, file)
            assert n_parts <= n_tensors * n_ranks
            assert n_copies <= n_tensors * n_ranks
            model.scheduler.forget()


def test_copies_are_as_many_as_runs_of_pages(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with load_model(path, n_ctx=1024, parallel=2) as model:
        ask(model, LONG[:300], 1)
        ask(model, OTHER[:300], 1)
        ask(model, LONG, 1)
        model.save_state(file)
        held = model.scheduler.cache.allocate(LONG)
        n_runs = len(Piece(0, 0, held.tables).runs(0, 0, held.n))
        model.scheduler.cache.free(held)
        assert n_runs > 1
        n_tensors = len(header_of(file)[0]) - 1
        before = file.read_bytes()
        n_parts, n_copies = n_steps(model.save_state, file)
        assert n_parts == n_tensors
        assert n_copies <= n_runs * n_tensors
        assert file.read_bytes() == before
    with load_model(path, n_ctx=1024, parallel=2) as model:
        ask(model, OTHER[:300], 1)
        n_parts, n_copies = n_steps(model.load_state, file)
        assert n_parts == n_tensors - 1, "the tokens are read with the header"
        assert n_copies <= n_runs * n_tensors
        model.save_state(file)
        assert file.read_bytes() == before


def check_refused(model: Model, file: Path, sentence: str) -> StateFileError:
    """Check that a file is refused and that the model's cache stays as it was."""
    model.scheduler.forget()
    model.logits([9, 8, 7])
    before = list(model.scheduler.last)
    with pytest.raises(StateFileError, match=sentence) as refused:
        model.load_state(file)
    assert model.scheduler.last == before
    assert ask(model, [9, 8, 7, 6], 1)[1] == 3
    assert str(refused.value).endswith(".")
    assert refused.value.hint
    return refused.value


def test_states_of_others_are_refused_with_a_sentence(
    path: Path, saved: Path, tmp_path: Path
) -> None:
    other = tiny_gguf(
        tmp_path / "other.gguf", n_layer=3, n_head=8, n_head_kv=4, head_dim=32, seed=3
    )
    with load_model(other, n_ctx=64) as model:
        refused = check_refused(
            model,
            saved,
            "chat.state cannot be used here: it was saved with a model other than tiny llama",
        )
        assert refused.path == str(saved)
    with load_model(path, kv_type="q8_0") as model:
        refused = check_refused(model, saved, "its keys and values are f16 instead of q8_0")
        assert refused.hint == "Load the model with the KV type f16."
    with load_model(path, kv_type="f16/q8_0") as model:
        check_refused(model, saved, "its keys and values are f16 instead of f16/q8_0")
    steering = write_control_vector(tmp_path / "c.gguf", {1: np.ones(64, np.float32)})
    with load_model(path, control_vectors=[(steering, 1.0)]) as model:
        check_refused(model, saved, "different control vectors")


def test_a_state_with_other_rotations_is_refused(tmp_path: Path) -> None:
    """LongRoPE takes other factors for long contexts, so keys would not fit together."""
    (family,) = (f for f in FAMILIES if f.name == "phi3-short")
    ids, _ = family.build(tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", n_ctx=16) as model:
        ask(model, ids[:5], 3)
        model.save_state(tmp_path / "state")
    with load_model(tmp_path / "m.gguf", n_ctx=17) as model:
        model.load_state(tmp_path / "state")
    with load_model(tmp_path / "m.gguf", n_ctx=4096) as model:
        check_refused(model, tmp_path / "state", "context length")


def set_in(name: str, key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda table: table[name].__setitem__(key, value)


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": set_in("__metadata__", "format", "pt"),
    "no metadata": lambda table: table.pop("__metadata__"),
    "metadata of a list": lambda table: table.__setitem__("__metadata__", ["format"]),
    "another version": set_in("__metadata__", "version", "1"),
    "a count of letters": set_in("__metadata__", "start", "one"),
    "a count of odd digits": set_in("__metadata__", "start", "²"),
    "a start behind the end": set_in("__metadata__", "start", "99"),
    "more saved than there is": set_in("__metadata__", "n_saved", "99"),
    "no tokens": lambda table: table.pop("tokens"),
    "tokens of another type": set_in("tokens", "dtype", "F32"),
    "a missing tensor": lambda table: table.pop("1.v"),
    "one too many": lambda table: table.__setitem__("9.v", table["1.v"]),
    "another shape": set_in("1.v", "shape", [2, 16, 64]),
    "another type": set_in("1.v", "dtype", "BF16"),
    "no entry": lambda table: table.__setitem__("1.v", None),
    "no place": lambda table: table["1.v"].pop("data_offsets"),
    "a place of texts": set_in("1.v", "data_offsets", ["0", "1"]),
    "a place of truth values": set_in("1.v", "data_offsets", [False, True]),
    "a place outside": set_in("1.v", "data_offsets", [10**15, 10**15 + 4096]),
    "a place before": set_in("1.v", "data_offsets", [-4096, 0]),
    "a place of another": lambda table: table["1.v"].update(table["1.k"]),
    "an empty place": set_in("tokens", "data_offsets", [0, 0]),
    "too many tokens": set_in("tokens", "data_offsets", [0, 1 << 40]),
    "a huge number": set_in("1.v", "data_offsets", [0, 10**4000]),
}  # fmt: skip


@pytest.mark.parametrize("problem", BROKEN)
def test_a_file_with_a_wrong_header_changes_nothing(
    model: Model, saved: Path, problem: str
) -> None:
    rewrite(saved, BROKEN[problem])
    check_refused(model, saved, "not a usable conversation state")


def test_tokens_that_the_model_does_not_have_are_refused(model: Model, saved: Path) -> None:
    for token in (-1, model.runtime.hp.n_vocab):
        _, behind = header_of(saved)
        rewrite(saved, lambda _: None, np.int32(token).tobytes() + behind[4:])
        check_refused(model, saved, "tokens that do not exist in the model")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"short", bytes(8), b"\xff" * 100, (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null", (1 << 40).to_bytes(8, "little") + b"{}" * 50,
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (40).to_bytes(8, "little") + b'{"__metadata__":{"format":"tandem state"}}'[:40],
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_what_is_no_state_changes_nothing(model: Model, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    check_refused(model, tmp_path / "x", "not a usable conversation state")


@pytest.mark.parametrize("n", [-1, 1, -1000])
def test_a_file_of_another_length_is_refused(model: Model, saved: Path, n: int) -> None:
    size = saved.stat().st_size
    os.truncate(saved, size + n)
    check_refused(model, saved, "truncated")


def test_a_folder_or_nothing_is_refused(model: Model, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        check_refused(model, path, "cannot be read")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 1200), data=st.binary(min_size=1, max_size=6))
def test_no_bytes_in_a_header_can_do_harm(model: Model, saved: Path, at: int, data: bytes) -> None:
    """A changed header is either refused, or means the same as before."""
    model.scheduler.forget()
    model.logits([9, 8, 7])
    whole = saved.read_bytes()
    n_header = 8 + int.from_bytes(whole[:8], "little")  # tokens and numbers follow, as they are
    at, data = at % n_header, data[: n_header - at % n_header]
    (copy := saved.with_name("copy")).write_bytes(whole[:at] + data + whole[at + len(data) :])
    try:
        ids = model.load_state(copy).ids
    except StateFileError:
        assert model.scheduler.last == [9, 8, 7]
    else:
        assert list(ids[:12]) == PROMPT


def test_a_file_that_ends_while_it_is_read_changes_nothing(model: Model, saved: Path) -> None:
    n_reports = 0

    def truncate(_: StateProgress) -> None:
        nonlocal n_reports
        n_reports += 1
        if n_reports == 3:
            os.truncate(saved, saved.stat().st_size // 2)

    expected = ask(model, [20, 21, 22], 5)[0]
    with pytest.raises(StateFileError, match="shorter"):
        model.load_state(saved, on_progress=truncate)
    assert n_reports > 3
    assert ask(model, [20, 21, 22], 5) == (expected, 2)


@pytest.mark.parametrize("act", ["save_state", "load_state"])
def test_both_can_be_cancelled(model: Model, saved: Path, act: str) -> None:
    whole, asked = saved.read_bytes(), 0
    model.scheduler.forget()
    model.logits([9, 8, 7])

    def is_cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == 5

    with pytest.raises(Cancelled):
        getattr(model, act)(saved, is_cancelled=is_cancelled)
    assert saved.read_bytes() == whole
    assert list(saved.parent.iterdir()) == [saved]
    assert model.n_cached == 3
    assert ask(model, [9, 8, 7, 6], 1)[1] == 3


def test_a_full_disk_leaves_the_file_before(
    model: Model, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved.read_bytes()
    real = os.fdopen

    class Full:
        def __init__(self, file: Any) -> None:
            self._file, self._n = file, 0

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, data: Any) -> None:
            self._n += len(data)
            if self._n > 3000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file.write(data)

    monkeypatch.setattr(os, "fdopen", lambda *args: Full(real(*args)))
    model.logits(PROMPT)
    with pytest.raises(
        StateFileError, match=r"The 0\.\d MiB state cannot be saved .* No space left"
    ) as full:
        model.save_state(saved)
    assert "Free space" in full.value.hint
    assert saved.read_bytes() == whole
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_is_not_there_is_said(model: Model, tmp_path: Path) -> None:
    model.logits(PROMPT)
    with pytest.raises(StateFileError, match="No such file or directory"):
        model.save_state(tmp_path / "none" / "state")


def test_a_closed_model_says_so(path: Path, saved: Path) -> None:
    model = load_model(path)
    model.close()
    for act in (model.save_state, model.load_state):
        with pytest.raises(EngineError, match="unloaded"):
            act(saved)
