"""Changes that make a sound GGUF file hostile; each knows what it breaks.

A mutation takes a random generator, the file to change, and another file to take things from.
"""

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz import gguf_words as words
from tests.fuzz.gguf_draft import FORMATS, Entry, FileDraft, Tensor, set_entry
from tests.helpers.raw_gguf import ARRAY, BOOL, F32, I32, I64, STRING, U32, U64

KINDS = (*range(14), 2**31, 2**32 - 1)
Mutation = Callable[[random.Random, FileDraft, FileDraft], None]


def some_entry(rng: random.Random, draft: FileDraft, prefix: str = "") -> int | None:
    """Return the index of a random entry, of those whose key begins with `prefix`."""
    found = [i for i, e in enumerate(draft.entries) if e.key.startswith(prefix.encode())]
    return rng.choice(found) if found else None


def fitting_kind(value: Any, rng: random.Random) -> int:
    """Return a kind that can hold a value, or now and then any other."""
    if rng.random() < 0.1:
        return rng.choice(tuple(FORMATS))
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return F32
    if isinstance(value, int):
        return U32 if 0 <= value < 2**32 else I32 if -(2**31) <= value < 0 else U64
    return STRING


def change_value(rng: random.Random, entry: Entry) -> Entry:
    """Return an entry with another value, of the same type if that can hold it."""
    if entry.is_list:
        return replace(entry, value=changed_list(rng, entry))
    if entry.kind == STRING:
        return replace(entry, value=words.text(rng, entry.value))
    value = words.number(rng, entry.value)
    kind = entry.kind if rng.random() < 0.5 else fitting_kind(value, rng)
    return replace(entry, value=value, kind=kind)


def changed_list(rng: random.Random, entry: Entry) -> list[Any]:
    """Return another list: items changed, doubled, left out, in another order, or all alike."""
    items = list(entry.value)
    if not items:
        return [0] * rng.choice((1, 5, 301))
    make = words.text if entry.item_kind == STRING else words.number
    at = rng.randrange(len(items))
    kind = rng.randrange(9)
    if kind < 3:
        for _ in range(rng.choice((1, 1, 2, 20))):
            at = rng.randrange(len(items))
            items[at] = make(rng, items[at])
    elif kind == 3:
        items[rng.randrange(len(items))] = items[at]
    elif kind == 4:
        del items[at : at + rng.choice((1, 1, 2, len(items)))]
    elif kind == 5:
        rng.shuffle(items)
    elif kind == 6:
        items = [make(rng, items[at])] * len(items)
    elif kind == 7:
        items += [make(rng, items[at]) for _ in range(rng.choice((1, 2, 64)))]
    else:
        items = items[: rng.randrange(len(items) + 1)]
    return items


def _changes(prefix: Callable[[FileDraft], str]) -> Mutation:
    def mutate(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
        index = some_entry(rng, draft, prefix(draft))
        if index is not None:
            draft.entries[index] = change_value(rng, draft.entries[index])

    return mutate


change_any = _changes(lambda _: "")
change_size = _changes(lambda draft: f"{draft.architecture}.")
change_tokenizer = _changes(lambda _: "tokenizer.")


def change_kind(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Store a value as another type, as a list, or as one item of a list."""
    index = some_entry(rng, draft)
    if index is None:
        return
    entry, kind = draft.entries[index], rng.randrange(4)
    if entry.is_list and kind == 0:
        item = entry.value[0] if entry.value else 0
        entry = replace(entry, kind=entry.item_kind, value=item)
    elif entry.is_list and kind == 1:
        entry = replace(entry, item_kind=rng.choice(KINDS))
    elif kind < 3 and entry.kind != ARRAY:
        items = [entry.value] * rng.choice((0, 1, 2, 3, 301))
        entry = Entry(entry.key, ARRAY, items, entry.kind)
    else:
        entry = replace(entry, kind=rng.choice(KINDS))
    draft.entries[index] = entry


def lie_about_length(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Claim another number of items or bytes."""
    index = some_entry(rng, draft)
    if index is None:
        return
    entry = draft.entries[index]
    if entry.kind in (ARRAY, STRING) and isinstance(entry.value, str | bytes | list):
        length = words.whole(rng, len(entry.value)) if rng.random() < 0.5 else 2**40
        length = len(entry.value) + rng.choice((-1, 1)) if rng.random() < 0.3 else length
        draft.entries[index] = replace(entry, length=length & 2**64 - 1)


def drop_entry(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Leave out an entry."""
    index = some_entry(rng, draft)
    if index is not None:
        del draft.entries[index]


def double_entry(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Write an entry twice, or under another key."""
    index = some_entry(rng, draft)
    if index is not None:
        entry = draft.entries[index]
        if rng.random() < 0.7:
            entry = replace(entry, key=words.key(rng, draft.architecture).encode())
        draft.entries.insert(rng.randrange(len(draft.entries) + 1), entry)


def odd_key(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Give an entry a key that nobody expects."""
    index = some_entry(rng, draft)
    if index is not None:
        entry, text = draft.entries[index], words.text(rng, draft.entries[index].key)
        key = text.encode() if isinstance(text, str) else text
        draft.entries[index] = replace(entry, key=key)


def add_known(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Set a key that readers look for to any value."""
    value: Any = words.number(rng) if rng.random() < 0.8 else words.text(rng)
    key = words.key(rng, draft.architecture).encode()
    entry = Entry(key, fitting_kind(value, rng), value)
    if rng.random() < 0.2:
        items = [value] * rng.choice((0, 1, 2, 3, 4, 301))
        entry = Entry(key, ARRAY, items, entry.kind)
    set_entry(draft, rng, entry)


def take_entry(rng: random.Random, draft: FileDraft, other: FileDraft) -> None:
    """Take an entry of another file, with its architecture's name replaced."""
    index = some_entry(rng, other)
    if index is None:
        return
    entry = other.entries[index]
    old, new = f"{other.architecture}.".encode(), f"{draft.architecture}.".encode()
    if entry.key.startswith(old):
        entry = replace(entry, key=new + entry.key[len(old) :])
    set_entry(draft, rng, entry)


def take_tokenizer(rng: random.Random, draft: FileDraft, other: FileDraft) -> None:
    """Take the whole tokenizer of another file."""
    draft.entries = [e for e in draft.entries if not e.key.startswith(b"tokenizer.")]
    draft.entries += [e for e in other.entries if e.key.startswith(b"tokenizer.")]


def change_kind_of_tokenizer(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Claim another kind of tokenizer, or other rules by which it cuts text into words."""
    set_entry(draft, rng, Entry(b"tokenizer.ggml.pre", STRING, rng.choice(words.PRE_NAMES)))
    if rng.random() < 0.3:
        set_entry(draft, rng, Entry(b"tokenizer.ggml.model", STRING, rng.choice(words.MODELS)))


def change_architecture(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Claim another architecture, with the keys renamed or not."""
    old, new = draft.architecture, rng.choice(words.ARCHITECTURES)
    set_entry(draft, rng, Entry(b"general.architecture", STRING, new))
    if rng.random() < 0.8 and old:
        a, b = f"{old}.".encode(), f"{new}.".encode()
        draft.entries = [
            replace(e, key=b + e.key[len(a) :]) if e.key.startswith(a) else e for e in draft.entries
        ]


def change_alignment(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Claim another alignment, and keep to it or not."""
    value = rng.choice((0, 1, 2, 3, 8, 31, 64, 4096, 2**20, 2**31, 2**63, -1))
    kind = I64 if value < 0 else U64
    set_entry(draft, rng, Entry(b"general.alignment", kind, value))
    if 0 < value <= 4096 and rng.random() < 0.5:
        draft.alignment = value


def change_counts(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Claim another version, or other counts of entries or tensors."""
    kind = rng.randrange(4)
    if kind == 0:
        draft.version = rng.choice((0, 1, 2, 2, 2, 4, 3 << 24, 2**32 - 1))
    elif kind == 1:
        draft.n_entries = max(0, len(draft.entries) + rng.choice((-1, 1)))
    elif kind == 2:
        draft.n_tensors = max(0, len(draft.tensors) + rng.choice((-1, 1)))
    else:
        count = int(rng.choice((0, 2**16, 2**18, 2**32, 2**60, 2**64 - 1)))
        if rng.random() < 0.5:
            draft.n_entries = count
        else:
            draft.n_tensors = count


def change_sizes(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Change the sizes of a tensor, or of all tensors of one name in their blocks."""
    if not draft.tensors:
        return
    chosen = rng.choice(draft.tensors)
    sizes, kind = list(chosen.sizes), rng.randrange(7)
    at = rng.randrange(len(sizes)) if sizes else 0
    if kind == 0 or not sizes:
        sizes.insert(at, rng.choice((0, 1, 2, 2**32)))
    elif kind == 1:
        del sizes[at]
    elif kind == 2:
        sizes.reverse()
    elif kind == 3:
        sizes = [rng.choice((2**20, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)) for _ in sizes]
    else:
        sizes[at] = words.whole(rng, sizes[at]) if kind == 4 else sizes[at] // 2 or 1
    suffix = chosen.name.split(b".", 2)[-1] if rng.random() < 0.4 else chosen.name
    draft.tensors = [
        replace(t, sizes=tuple(sizes)) if t.name.endswith(suffix) else t for t in draft.tensors
    ]


def change_tensor(rng: random.Random, draft: FileDraft, other: FileDraft) -> None:
    """Change the name, type or place of a tensor; leave it out; take one of another file."""
    if not draft.tensors:
        return
    at, kind = rng.randrange(len(draft.tensors)), rng.randrange(9)
    chosen = draft.tensors[at]
    if kind == 0:
        del draft.tensors[at]
    elif kind == 1:
        draft.tensors.insert(at, chosen)
    elif kind == 2:
        text = rng.choice(words.TENSOR_NAMES) if rng.random() < 0.7 else words.text(rng)
        name = text.encode() if isinstance(text, str) else text
        draft.tensors[at] = replace(chosen, name=name)
    elif kind == 3:
        number = rng.choice((*range(44), 99, 2**31, 2**32 - 1))
        same = chosen.name if rng.random() < 0.5 else chosen.name.split(b".", 2)[-1]
        draft.tensors = [
            replace(t, kind=number) if t.name.endswith(same) else t for t in draft.tensors
        ]
    elif kind == 4:
        place = rng.choice(draft.tensors).offset + rng.choice((0, 0, 32, -32, 1))
        draft.tensors[at] = replace(chosen, offset=place)
    elif kind == 5:
        place = rng.choice((0, 32, 2**31, 2**40, 2**62, 2**63, 2**63 - 32, 2**64 - 32))
        draft.tensors[at] = replace(chosen, offset=place)
    elif kind == 6 and other.tensors:
        draft.tensors.append(replace(rng.choice(other.tensors), offset=chosen.offset))
    elif kind == 7:
        other_at = rng.randrange(len(draft.tensors))
        name = draft.tensors[other_at].name
        draft.tensors[other_at] = replace(draft.tensors[other_at], name=chosen.name)
        draft.tensors[at] = replace(chosen, name=name)
    else:
        add_tensor(rng, draft, chosen)


def add_tensor(rng: random.Random, draft: FileDraft, like: Tensor) -> None:
    """Add a small tensor of floats behind the others, with its data."""
    size = rng.choice((*like.sizes, 1, 2, 8, 16, 64))
    if not 0 < size <= 4096:
        return
    start = -(-len(draft.weights) // 32) * 32
    name = rng.choice(words.TENSOR_NAMES).encode()
    draft.tensors.append(Tensor(name, (size,), 0, start))
    draft.weights = draft.weights.ljust(start, b"\0") + struct.pack("<f", 0.5) * size


def repeat_blocks(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Give the model many more blocks, of zeros, all like the first one."""
    first = [t for t in draft.tensors if t.name.startswith(b"blk.0.")]
    stride = (max((t.offset for t in first), default=0) + len(draft.weights) + 4096) & ~4095
    n = rng.choice((4, 8, 8, 64, 64, 200)) if rng.random() < 0.9 else rng.choice((1024, 1025))
    draft.tensors = [t for t in draft.tensors if not t.name.startswith(b"blk.")] + [
        replace(t, name=b"blk.%d." % block + t.name[6:], offset=t.offset + block * stride)
        for block in range(n)
        for t in first
    ]
    draft.hole += n * stride
    set_entry(draft, rng, Entry(f"{draft.architecture}.block_count".encode(), U32, n))


def add_many(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Add thousands of entries, or of tensors."""
    n = rng.choice((300,) * 20 + (3000,) * 3 + (30_000,))
    start = draft.hole + len(draft.weights) + 32 & ~31
    if rng.random() < 0.5:
        draft.entries += [Entry(b"many.%d" % i, U32, i) for i in range(n)]
    else:
        draft.tensors += [Tensor(b"many.%d" % i, (1,), 0, start + 32 * i) for i in range(n)]
        draft.hole += 32 * n + 64


def change_weights(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Put bytes into the weights that mean huge numbers, infinities or no number."""
    if draft.weights:
        data = bytearray(draft.weights)
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(data))
            bad = rng.choice(
                (b"\xff" * 4, b"\x00\x00\x80\x7f", b"\x00\x7c", b"\xff\x7f", b"\0" * 64)
            )
            data[at : at + len(bad)] = bad[: len(data) - at]
        draft.weights = bytes(data)


def edit_bytes(rng: random.Random, draft: FileDraft, other: FileDraft) -> None:
    """Change bytes of the finished file: flips, numbers, cuts, insertions, a piece of another."""
    # the header is small beside the weights, and is what can be broken
    kind, place, draw = rng.randrange(6), rng.random() ** 3, rng.randrange(2**32)
    number = int(rng.choice((0, 1, 8, 9, 2**8, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)))
    piece = b"".join(e.data for e in other.entries[:5])[:2000] if kind == 5 else b""

    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        if kind == 0:
            return data[:at] + bytes([data[at] ^ 1 << draw % 8]) + data[at + 1 :] if data else data
        if kind == 1:
            return data[:at] + struct.pack("<Q", number) + data[at + 8 :]
        if kind == 2:
            return data[:at]
        if kind == 3:
            return data[:at] + data[at + 1 + draw % 16 :]
        if kind == 4:
            return data[:at] + draw.to_bytes(4, "little") * (1 + draw % 8) + data[at:]
        return data[:at] + piece + data[at + len(piece) * (draw % 2) :]

    draft.edits.append(edit)


def change_order(rng: random.Random, draft: FileDraft, _: FileDraft) -> None:
    """Write entries or tensors in another order."""
    rng.shuffle(draft.entries if rng.random() < 0.5 else draft.tensors)


HEADER: Sequence[tuple[Mutation, float]] = (
    (change_any, 3), (change_size, 6), (change_tokenizer, 3), (change_kind, 3),
    (lie_about_length, 3), (drop_entry, 2), (double_entry, 2), (odd_key, 1), (add_known, 5),
    (take_entry, 2), (change_architecture, 2), (change_alignment, 1), (change_counts, 2),
    (change_sizes, 4), (change_tensor, 5), (edit_bytes, 8), (change_order, 1),
    (repeat_blocks, 0.2), (add_many, 0.1),
)  # fmt: skip
"""Mutations of anything in a header, with how often each is drawn."""

TOKENIZER: Sequence[tuple[Mutation, float]] = (
    (change_tokenizer, 12), (change_kind_of_tokenizer, 4), (add_known, 3), (take_entry, 4),
    (take_tokenizer, 2), (drop_entry, 1), (change_kind, 1), (change_any, 1),
)  # fmt: skip
"""Mutations that reach the tokenizer: few of them damage the header."""

LOAD: Sequence[tuple[Mutation, float]] = (
    (change_size, 5), (add_known, 5), (change_tokenizer, 3), (take_entry, 2), (change_sizes, 3),
    (change_tensor, 4), (change_weights, 10), (change_architecture, 1), (drop_entry, 1),
    (edit_bytes, 1), (take_tokenizer, 1), (change_any, 1), (change_order, 1),
)  # fmt: skip
"""Mutations that reach the weights and what computes with them."""


def mutate(
    rng: random.Random, draft: FileDraft, other: FileDraft, table: Sequence[tuple[Mutation, float]]
) -> None:
    """Change a file in one to four ways."""
    functions, weights = zip(*table, strict=True)
    for function in rng.choices(functions, weights, k=rng.choice((1, 1, 1, 2, 2, 3, 4))):
        function(rng, draft, other)
