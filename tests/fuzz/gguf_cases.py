"""The cases of the fuzzer: hostile files that follow from a seed and a number."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.vision.encoders.registry import ENCODERS
from tests.fuzz import gguf_words as words
from tests.fuzz.gguf_draft import Entry, FileDraft, set_entry
from tests.fuzz.gguf_mutations import HEADER, LOAD, TOKENIZER, Mutation, mutate
from tests.helpers.golden import golden_root
from tests.helpers.raw_gguf import U32
from tests.helpers.tiny_gguf import tiny_gguf
from tests.helpers.tiny_mmproj import tiny_mmproj

SHARES = {"header": 80, "plan": 7, "tokenizer": 6, "load": 3, "tower": 4}
"""Executions of each target, of a hundred."""

MAX_BYTES = 3_000_000
"""Largest reference file to start from, in bytes."""

ONE_FILE = "case.gguf"

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """Files and the target that reads them.

    Attributes:
        target: what to do with the files; a key of `SHARES`.
        files: bytes of each file, and the size of the hole behind them.
        first: name of the file to open.
        draw: number that chooses what the target has a choice of, such as ranks.
    """

    target: str
    files: dict[str, tuple[bytes, int]] = field(repr=False)
    first: str
    draw: int

    def write(self, folder: Path) -> Path:
        """Write the files into an empty folder and return the path of the one to open."""
        for name, (data, hole) in self.files.items():
            path = folder / name
            path.write_bytes(data)
            if hole:
                os.truncate(path, len(data) + hole)
        return folder / self.first


@cache
def seeds() -> tuple[FileDraft, ...]:
    """Return sound models of several kinds, the same on every machine."""
    least = {"n_embd": 32, "n_ff": 64, "n_head": 2, "n_head_kv": 2}
    with TemporaryDirectory() as name:
        path = Path(name) / "seed.gguf"
        return tuple(
            FileDraft.read(tiny_gguf(path, **{**least, **options}))
            for options in (
                {},
                {"quant": "Q8_0", "chat_template": CHATML, "tied": True},
                {"quant": "Q4_0", "n_expert": 4, "n_head": 4},
                {"arch": "qwen2", "qkv_bias": True, "chat_template": CHATML},
                {"arch": "qwen3", "qk_norm": True, "quant": "Q5_0", "tied": True},
                {"arch": "bitnet", "quant": "TQ2_0", "n_embd": 256, "n_ff": 256},
                {"extra": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}},
            )
        )


@cache
def towers() -> tuple[FileDraft, ...]:
    """Return sound files that encode pictures, one of each kind, the same on every machine."""
    with TemporaryDirectory() as name:
        path = Path(name) / "mmproj.gguf"
        return tuple(FileDraft.read(tiny_mmproj(path, projector)) for projector in sorted(ENCODERS))


@cache
def reference_files() -> tuple[Path, ...]:
    """Return the small models of the reference data; none where there is no such data."""
    found = golden_root().glob("*.gguf")
    return tuple(sorted(path for path in found if path.stat().st_size <= MAX_BYTES))


@cache
def _reference(path: Path) -> FileDraft | None:
    try:
        return FileDraft.read(path)
    except ValueError:  # a type that the package gguf does not know
        return None


def any_seed(rng: random.Random, with_references: bool) -> FileDraft:
    """Return a sound file; half of them are reference files, if there are any."""
    files = reference_files() if with_references else ()
    found = _reference(rng.choice(files)) if files and rng.random() < 0.5 else None
    return found or rng.choice(seeds())


def make_case(seed: int, number: int, with_references: bool) -> Case:
    """Return the case of a number, which depends on nothing else.

    Args:
        with_references: whether to start from reference files as well, where there are any.
    """
    rng = random.Random(f"{seed}/{number}")
    target = rng.choices(list(SHARES), list(SHARES.values()))[0]
    tables = {"tokenizer": TOKENIZER, "load": LOAD, "tower": LOAD}
    table: Sequence[tuple[Mutation, float]] = tables.get(target, HEADER)
    draft, other = (
        rng.choice(towers()).copy()
        if target == "tower"
        else any_seed(rng, with_references and target != "tokenizer").copy()
        for _ in range(2)
    )
    hollow = target in ("header", "plan")
    if target not in ("tokenizer", "tower") and rng.random() < 0.1:
        parts = _parts(rng, draft)
        for part in rng.sample(parts, rng.randrange(1, len(parts) + 1)):
            mutate(rng, part, other, table)
        files = {name: part.encoded(hollow) for name, part in _named(rng, parts).items()}
    else:
        mutate(rng, draft, other, table)
        files = {ONE_FILE: draft.encoded(hollow)}
    return Case(target, files, rng.choice(list(files)), rng.randrange(2**32))


def _parts(rng: random.Random, draft: FileDraft) -> list[FileDraft]:
    """Return the file as two or three parts, of which now and then one lies about its place."""
    count = rng.choice((2, 2, 3))
    parts = [
        FileDraft(list(draft.entries) if no == 0 else [], draft.tensors[no::count], draft.weights)
        for no in range(count)
    ]
    for no, part in enumerate(parts):
        part.entries += [
            Entry(b"split.no", U32, no),
            Entry(b"split.count", U32, count),
            Entry(b"split.tensors.count", U32, len(draft.tensors)),
        ]
    if rng.random() < 0.4:
        key = rng.choice(("split.no", "split.count", "split.tensors.count"))
        value = words.number(rng, count)
        set_entry(rng.choice(parts), rng, Entry(key.encode(), rng.choice((U32, 5, 10)), value))
    return parts


def _named(rng: random.Random, parts: Sequence[FileDraft]) -> dict[str, FileDraft]:
    """Return the parts by name; now and then one is missing, or two change places."""
    n = len(parts)
    names = [f"case-{no + 1:05d}-of-{n:05d}.gguf" for no in range(n)]
    if rng.random() < 0.1:
        rng.shuffle(names)
    named = dict(zip(names, parts, strict=True))
    if rng.random() < 0.1:
        del named[rng.choice(names)]
    return named
