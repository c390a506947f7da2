"""Files of every family with one or more faults: each gives a sentence or a working model.

The files are written by `tests.helpers.hf_models`; architectures that it does not have, and more
variants, are taken from the reference data where there is some.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import TYPES
from engine.load_params import LoadParams
from engine.model.architectures.declare import IGNORED, declare
from engine.model.architectures.registry import is_supported, supported_architectures
from engine.model.layers.keys import BOUNDS, SCALING_TYPES, UNPREFIXED
from tests.helpers.golden import golden_models, golden_path
from tests.helpers.hostile import (
    INF,
    numeric_keys,
    problem_of,
    random_blocks,
    random_tensor,
    run,
    shapes_for,
    values_for,
    with_tensor,
    without,
)
from tests.helpers.model_draft import ModelDraft

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from tests.helpers.hf_models import FAMILIES

T = TypeVar("T")

FAMILY = {family.name: family for family in FAMILIES if is_supported(family.arch)}

SUPPORTED = supported_architectures()

OPTIONAL = re.compile(
    r"(output|rope_freqs)\.weight|.*\.bias|.*_exps\.scale|.*\.exp_probs_b"
    r"|.*\.(attn_(v|q_norm|k_norm|gate)|ffn_gate_inp_shexp|layer_output_scale|ssm_norm)\.weight"
)
"""Tensors that files of some models of a family lack in all blocks of a kind."""

UNREAD = re.compile(IGNORED.pattern + r"|.*\.attn_kv_b\.weight")
"""Tensors that a file may have but nobody reads; keys and values may also be stored joined."""

COMPANIONS = {
    "attn_qkv": "attn_[qkv]",
    "attn_k_b": "attn_v_b",
    "ffn_gate_up_exps": "ffn_(gate|up)_exps",
    "ffn_down_exps": "ffn_(gate|up)_exps",
    "ffn_down_shexp": "ffn_(gate|up)_shexp",
    "token_embd": "output",
}
"""Tensors that are named instead: a part of what is fused, or the other one of two that differ."""


@dataclass(frozen=True)
class Subject:
    """A sound file taken apart, and a folder for variants of it."""

    name: str
    draft: ModelDraft
    path: Path
    is_swept: bool

    @property
    def arch(self) -> str:
        arch: str = self.draft.meta["general.architecture"]
        return arch

    @property
    def n_layer(self) -> int:
        n: int = self.draft.meta[f"{self.arch}.block_count"]
        return n

    def some(self, cases: Sequence[T], one_in: int) -> Sequence[T]:
        """Return one of `one_in` cases, a third of them outside sweeps; others for each file."""
        one_in *= 1 if self.is_swept else 3
        return cases[crc32(self.name.encode()) % one_in :: one_in]


def subjects() -> Iterator[Any]:
    """Yield one file of each architecture; the sweep has all files, and more cases of each."""
    known: set[str] = set()
    for name, arch in [*((f.name, f.arch) for f in FAMILY.values()), *golden_models().items()]:
        if is_supported(arch):
            if arch not in known:
                yield pytest.param((name, False), id=name)
            yield pytest.param((name, True), id=f"{name}-swept", marks=pytest.mark.slow)
            known.add(arch)


def sound_file(name: str, folder: Path) -> ModelDraft:
    if name not in FAMILY:
        try:
            return ModelDraft.read(golden_path(f"{name}.gguf"))
        except ValueError:
            pytest.skip("it has a type that the package gguf does not know")
    path = folder / f"{name}.gguf"
    FAMILY[name].build(path)
    return ModelDraft.read(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, folder: Path) -> Subject:
    """Return a file that runs, taken apart once for all tests that break it."""
    name, is_swept = request.param
    subject = Subject(name, sound_file(name, folder), folder / "hostile.gguf", is_swept)
    assert not run(subject.draft, subject.path)
    return subject


each_subject = pytest.mark.parametrize("subject", list(subjects()), indirect=True)


def names(tensor: str, problem: str) -> bool:
    """Return whether a sentence names a tensor, or the other one that it does not fit."""
    stem, kind = tensor.rsplit(".", 1) if tensor.endswith((".weight", ".bias")) else (tensor, "")
    block, _, part = stem.rpartition(".")
    found = rf"{re.escape(block)}\.?({part}|{COMPANIONS.get(part, part)})(\.{kind}|\b)"
    return re.search(found, problem) is not None


def first_ones(tensors: Iterable[str]) -> list[str]:
    """Return each tensor of the blocks once: from the first block that has it."""
    found: dict[str, str] = {}
    for name in tensors:
        found.setdefault(re.sub(r"^blk\.\d+", "blk", name), name)
    return list(found.values())


def unused(path: Path) -> list[str]:
    """Return the tensors in a file that a model does not use fully, but for ignored ones."""
    with GGUFFile.open(path) as file:
        slots = declare(file, LoadParams(str(path))).slots
        read = {(slot.tensor.offset, slot.tensor.n_bytes) for slot in slots}
        return [
            name
            for name, t in file.tensors.items()
            if not UNREAD.fullmatch(name)
            and sum(n for at, n in read if t.offset <= at < t.offset + t.n_bytes) < t.n_bytes
        ]


@each_subject
def test_a_missing_tensor_is_named(subject: Subject) -> None:
    """Or the model works without: then no block of its kind has it."""
    tensors = subject.draft.tensors
    for name in tensors if subject.is_swept else subject.some(first_ones(tensors), 1):
        draft = without(subject.draft, name)
        problem = problem_of(draft, subject.path)
        if problem:
            assert names(name, problem), f"without {name}: {problem}"
        else:
            assert OPTIONAL.fullmatch(name), f"{name} is left out"
            assert not run(draft, subject.path)


def may_be(tensor: str, shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether a tensor may also have another shape.

    A tied embedding is all that says how large a vocabulary is; norms of groups may be flat.
    """
    if tensor == "token_embd.weight":
        return other[1:] == shape[1:]
    return tensor.endswith("ssm_norm.weight") and other == (math.prod(shape),)


@each_subject
def test_a_misshapen_tensor_is_named(subject: Subject) -> None:
    """Only the first block is tried, as all are declared alike."""
    cases = [
        (name, shape)
        for name in first_ones(subject.draft.tensors)
        for shape in shapes_for(subject.draft.tensors[name].shape)
    ]
    for name, shape in subject.some(cases, 3):
        draft = with_tensor(subject.draft, name, random_tensor(shape))
        problem = problem_of(draft, subject.path)
        if problem:
            assert names(name, problem), f"{name} as {shape}: {problem}"
        else:
            assert may_be(name, subject.draft.tensors[name].shape, shape), f"{name} as {shape}"
            assert not run(draft, subject.path)


@each_subject
def test_any_value_of_a_key_works_or_is_refused(subject: Subject) -> None:
    meta = subject.draft.meta
    cases = [
        (key, value)
        for key in numeric_keys(subject.draft)
        for value in values_for(meta[key], subject.n_layer)
    ]
    work_or_are_refused(subject, subject.some(cases, 6))


@each_subject
def test_a_key_that_the_file_lacks_works_or_is_refused(subject: Subject) -> None:
    """Those of other families are not read, or must fit what is there."""
    keys = [n if n.startswith(UNPREFIXED) else f"{subject.arch}.{n}" for n in BOUNDS]
    lacking = [key for key in keys if key not in subject.draft.meta]
    cases = [(key, value) for key in lacking for value in (0, 3, -1, INF, 0.5, [2], "x", 16)]
    work_or_are_refused(subject, subject.some(cases, 18))


def work_or_are_refused(subject: Subject, cases: Sequence[tuple[str, Any]]) -> None:
    """Inspect all files; run one in four of those without a known problem."""
    n_sound = 0
    for key, value in cases:
        draft = subject.draft.changed({key: value})
        try:
            if problem_of(draft, subject.path):
                continue
            n_sound += 1
            if n_sound % 4 == 0:
                run(draft, subject.path)
        except BaseException as error:
            error.add_note(f"{key}: {value}")
            raise


@each_subject
def test_an_unknown_tensor_is_named(subject: Subject) -> None:
    """Also one that only draft models have, and a block that is not counted."""
    n, last = subject.n_layer, f"blk.{subject.n_layer - 1}"
    for name in ("surprise.weight", "blk.0.surprise.weight", f"{last}.nextn.eh_proj.weight"):
        draft = with_tensor(subject.draft, name, random_tensor((64,)))
        assert f"has the tensor '{name}'" in problem_of(draft, subject.path)
    draft = with_tensor(subject.draft, f"blk.{n}.attn_norm.weight", random_tensor((64,)))
    assert "the file has more blocks" in problem_of(draft, subject.path)


@pytest.fixture(scope="module")
def all_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return a shape of each tensor that any family has in its first block or outside blocks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in FAMILY:
        tensors = sound_file(name, folder).tensors
        shapes |= {re.sub(r"^blk\.\d+", "blk.0", n): t.shape for n, t in tensors.items()}
    return shapes


@each_subject
def test_a_tensor_of_another_family_is_used_or_refused(
    subject: Subject, all_tensors: dict[str, tuple[int, ...]]
) -> None:
    """Never left out without a word, but where other tensors say the same."""
    others = [n for n in all_tensors if n not in subject.draft.tensors and not UNREAD.fullmatch(n)]
    for name in subject.some(others, 4):
        shape = all_tensors[name]
        draft = with_tensor(subject.draft, name, random_tensor(shape))
        if not problem_of(draft, subject.path):
            assert not unused(subject.path), f"with {name}"


class Mutations:
    """Generator of changes to a file, also by tensors and keys of other families."""

    def __init__(self, drafts: dict[str, ModelDraft]) -> None:
        self.drafts = drafts
        self.values: dict[str, list[Any]] = {name: [] for name in BOUNDS}
        for draft in drafts.values():
            arch = draft.meta["general.architecture"]
            for key in numeric_keys(draft):
                known = self.values.setdefault(key.removeprefix(f"{arch}."), [])
                known += [v for v in [draft.meta[key]] if v not in known]
        self.values["rope.scaling.type"] = [*SCALING_TYPES, ""]

    def draw(self, data: st.DataObject) -> ModelDraft:
        draft = self.drafts[data.draw(st.sampled_from(list(self.drafts)))].copy()
        kinds = st.sampled_from(["key", "tensor", "exchange", "rename", "type", "architecture"])
        for kind in data.draw(st.lists(kinds, min_size=1, max_size=3)):
            getattr(self, kind)(draft, data)
        return draft

    def key(self, draft: ModelDraft, data: st.DataObject) -> None:
        arch = draft.meta["general.architecture"]
        name = data.draw(st.sampled_from(list(self.values)))
        key = name if name.startswith(UNPREFIXED) else f"{arch}.{name}"
        n_layer = draft.meta.get(f"{arch}.block_count")
        others = values_for(draft.meta.get(key), n_layer if n_layer in range(1, 9) else 2)
        value = data.draw(st.sampled_from([*self.values[name], *others]))
        draft.meta.pop(key, None)
        if value is not None:
            draft.meta[key] = value

    def tensor(self, draft: ModelDraft, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(draft.tensors)))
        shape = data.draw(st.sampled_from([None, *shapes_for(draft.tensors.pop(name).shape)]))
        if shape is not None:
            draft.tensors[name] = random_tensor(shape)

    def type(self, draft: ModelDraft, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(draft.tensors)))
        shape = draft.tensors[name].shape
        fitting = [number for number, t in TYPES.items() if shape[-1] % t.block_size == 0]
        draft.tensors[name] = random_blocks(shape, data.draw(st.sampled_from(fitting)))

    def architecture(self, draft: ModelDraft, data: st.DataObject) -> None:
        old, new = draft.meta["general.architecture"], data.draw(st.sampled_from(SUPPORTED))
        for key in [key for key in draft.meta if key.startswith(f"{old}.")]:
            draft.meta[new + key.removeprefix(old)] = draft.meta.pop(key)
        draft.meta["general.architecture"] = new

    def exchange(self, draft: ModelDraft, data: st.DataObject) -> None:
        a, b = (data.draw(st.sampled_from(list(draft.tensors))) for _ in range(2))
        draft.tensors[a], draft.tensors[b] = draft.tensors[b], draft.tensors[a]

    def rename(self, draft: ModelDraft, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(list(draft.tensors)))
        other = self.drafts[data.draw(st.sampled_from(list(self.drafts)))]
        draft.tensors[data.draw(st.sampled_from(list(other.tensors)))] = draft.tensors.pop(old)


@pytest.fixture(scope="module")
def mutations(folder: Path) -> Mutations:
    return Mutations({name: sound_file(name, folder) for name in FAMILY})


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_several_changes_at_once_work_or_are_refused(
    mutations: Mutations, folder: Path, data: st.DataObject
) -> None:
    check_changes(mutations, folder, data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_a_thousand_changes_work_or_are_refused(
    mutations: Mutations, folder: Path, data: st.DataObject
) -> None:
    check_changes(mutations, folder, data)


def check_changes(mutations: Mutations, folder: Path, data: st.DataObject) -> None:
    draft = mutations.draw(data)
    path = folder / "mutated.gguf"
    if not problem_of(draft, path):
        assert not unused(path)
        run(draft, path)
