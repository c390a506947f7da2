"""Files with MTP blocks, and draft models with their memory.

With `--mtp`, llama.cpp's converter writes a file with a model's MTP blocks, numbered after the
model's own blocks, and with the embedding, final norm and head that they share with the model. A
draft model is a separate, smaller model with the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, ModelFileError, Sentence
from engine.formats.gguf.companions import MTP_MARK, Stamp, files_beside, stamp_of, with_blocks_of
from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import quote, split_name
from engine.hardware.backend_choice import uses_kernels
from engine.hardware.devices.types import CPU
from engine.load_params import LoadParams
from engine.model.architectures.declare import IGNORED, declare, n_mtp_blocks, read_sizes
from engine.model.forward.batch import PROMPT_BATCH
from engine.model.forward.state import RecurrentState
from engine.model.layers.hparams import n_trunk_blocks
from engine.model.layers.keys import Keys
from engine.model.layers.mtp import HEAD, MAP, draft_map, draft_tokens, is_named
from engine.planning.rank_size import rank_memory, rank_size

if TYPE_CHECKING:
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.architectures.declare import Declaration

SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")
"""Tensors in a file with MTP blocks for which the model's own are used instead."""

REVERSE = "t2d"
"""Last part of the tensor name for a shortened head's reverse token map."""

MAX_MTP_FILES = 8
"""Maximum number of cached files; a drag makes a plan per mouse move."""


def draft_model_path(params: LoadParams) -> str:
    """Return the path of the draft model; "" if there is none or the file has only MTP blocks."""
    return "" if is_mtp_file(params.draft_path) else params.draft_path


def is_mtp_file(path: str) -> bool:
    """Return whether a file has MTP blocks but none of the trunk."""
    return bool(path) and _is_mtp_file(path, stamp_of(Path(path)))


@lru_cache(MAX_MTP_FILES)
def _is_mtp_file(path: str, stamp: Stamp) -> bool:
    try:
        with GGUFFile.open(path) as file:
            return n_mtp_blocks(file) > 0 and _lacks_trunk(file)
    except EngineError:
        return False


def _lacks_trunk(file: GGUFFile) -> bool:
    first = n_trunk_blocks(Keys(file.meta))
    return not any((block := split_name(name)) and block[0] < first for name in file.tensors)


@contextmanager
def with_mtp_file(file: GGUFFile, path: str) -> Iterator[GGUFFile]:
    """Yield a model's file with the MTP blocks from another file, or unchanged if `path` is empty.

    Raises:
        EngineError: the other file is for another model, or cannot be read.
    """
    if not path:
        yield file
        return
    with GGUFFile.open(path) as other:
        yield joined(file, other)


def mtp_path(file: GGUFFile, params: LoadParams) -> str:
    """Return the path of the file with MTP blocks to load with a model; "" if there is none.

    A file named in `params` is always used; one next to the model only if the model has no MTP
    block and no other machine, which may lack that file, takes part.
    """
    if is_mtp_file(params.draft_path):
        return params.draft_path
    is_wanted = params.draft == "mtp" or (
        params.draft == "auto" and set(params.all_devices) == {CPU}
    )
    if not is_wanted or params.machines or n_mtp_blocks(file):
        return ""
    return _beside(str(file.path), stamp_of(file.path.parent))


@lru_cache(MAX_MTP_FILES)
def _beside(model: str, stamp: Stamp) -> str:
    for path in files_beside(Path(model), MTP_MARK, is_first=True):
        if is_mtp_file(str(path)):
            try:
                with GGUFFile.open(model) as file, GGUFFile.open(path) as other:
                    joined(file, other)
            except EngineError:
                continue
            return str(path)
    return ""


def joined(file: GGUFFile, other: GGUFFile) -> GGUFFile:
    """Return a model's file with the MTP blocks from another file.

    Raises:
        ModelFileError: the other file is for another model, or has unusable parts.
    """
    ours, theirs = _facts(file), _facts(other)
    if ours != theirs:
        raise ModelFileError(
            other.path,
            "{file} is the MTP block of another model: of {other}, but this one is {model}.",
            "Choose the file that was published with the model.",
            file=other.path.name, other=_named(theirs), model=_named(ours),
        )  # fmt: skip
    layers = range(ours[1], ours[1] + n_mtp_blocks(other))
    _check_parts(other, layers)
    own_map = draft_map(file)
    without = () if own_map is None else (own_map.name,)
    return with_blocks_of(file, other, layers, _short_heads(other, layers), without)


def _short_heads(file: GGUFFile, layers: range) -> dict[str, TensorInfo]:
    # heads for only some tokens, renamed as parts of the blocks
    tokens, head = draft_map(file), file.tensors.get(SHARED[-1])
    if tokens is None:
        return {}
    found = {f"blk.{layers.start}.nextn.{MAP}": tokens}
    for own in (f"blk.{layer}.{HEAD}" for layer in layers):
        if own not in file.tensors and head is not None:
            found[own] = head
    return {name: replace(tensor, name=name) for name, tensor in found.items()}


def _facts(file: GGUFFile) -> tuple[str, int, int, int]:
    # architecture, number of trunk blocks, width and vocabulary size
    keys = Keys(file.meta)
    keys.check_bounds()
    embedding = file.tensors.get(SHARED[0])
    n_tokens = file.meta.array_length("tokenizer.ggml.tokens")
    if n_tokens is None:
        n_tokens = 0 if embedding is None else embedding.shape[0]
    return (
        file.meta.architecture, n_trunk_blocks(keys), keys.integer("embedding_length"), n_tokens
    )  # fmt: skip


def _named(facts: tuple[str, int, int, int]) -> Sentence:
    arch, n_block, width, n_tokens = facts
    return Sentence(
        "{arch} with {n} blocks, width {width} and {n_tokens} tokens",
        arch=arch, n=n_block, width=width, n_tokens=n_tokens,
    )  # fmt: skip


def _check_parts(file: GGUFFile, layers: range) -> None:
    n_tokens, mapped = _facts(file)[-1], draft_map(file)
    own = [f"blk.{layer}.{HEAD}" for layer in layers]
    if any(name not in file.tensors for name in own):
        own.append(SHARED[-1])
    n_rows = n_tokens if mapped is None else len(draft_tokens(file, n_tokens))
    for name, tensor in file.tensors.items():
        if is_named(name, MAP) or is_named(name, REVERSE):
            continue
        block = split_name(name)
        if name in own and tensor.shape[0] < n_tokens and tensor.shape[0] != n_rows:
            raise ModelFileError(
                file.path,
                "{file} cannot be used: its head covers only some of the model's tokens, and the"
                " file does not say which.",
                "Choose a file with the full head; Tandem can shorten it.",
                file=file.path.name,
            )
        if block is None and name not in SHARED and not IGNORED.fullmatch(name):
            raise ModelFileError(
                file.path,
                "{file} cannot be used: it has the tensor {name}, which MTP blocks do not have.",
                "It may be a newer variant: check for a Tandem update, or try another file.",
                file=file.path.name,
                name=quote(name),
            )


MAX_DRAFT_MODELS = 8
"""Maximum number of cached draft models; a drag makes a plan per mouse move."""


def draft_params(params: LoadParams, n_ctx: int) -> LoadParams:
    """Return the settings with which a model's draft model is loaded.

    The whole draft model is placed on one device, with at most the context it was trained for.

    Args:
        params: settings of the target model.

    Raises:
        ModelFileError: the draft model's file cannot be read or used.
    """
    wanted = LoadParams(
        path=params.draft_path, devices=(params.draft_device,), n_ctx=n_ctx,
        parallel=params.parallel, cpu_threads=params.cpu_threads, draft="off",
        fast_prompts=params.fast_prompts, n_batch=PROMPT_BATCH, reserve=params.reserve,
    )  # fmt: skip
    with GGUFFile.open(wanted.path) as file:
        _, hp = read_sizes(file, wanted)
    return replace(wanted, n_ctx=min(n_ctx, hp.n_ctx_train or n_ctx))


def draft_bytes(params: LoadParams, n_ctx: int) -> int:
    """Return the predicted bytes of a draft model; 0 if there is none.

    Args:
        params: settings of the target model.

    Raises:
        EngineError: the file cannot be read, or its model cannot draft.
    """
    if not draft_model_path(params):
        return 0
    stamp = stamp_of(Path(params.draft_path))  # zeros if missing; opening raises the error
    wanted = LoadParams(
        path="", devices=params.devices, split=params.split, parallel=params.parallel,
        draft=params.draft, fast_prompts=params.fast_prompts,
    )  # fmt: skip
    return _draft_bytes(wanted, n_ctx, stamp)


@lru_cache(MAX_DRAFT_MODELS)
def _draft_bytes(params: LoadParams, n_ctx: int, stamp: Stamp) -> int:
    wanted = draft_params(params, n_ctx)
    with GGUFFile.open(wanted.path) as file:
        declaration = declare(file, wanted)
        check_rewinds(declaration, file)
        storage = "kernels" if uses_kernels(wanted.devices[0]) else "f32"
        size = rank_size(declaration, 0, storage, wanted.kv_type)
        hp, device = declaration.hp, wanted.devices[0]
    return rank_memory(wanted, hp, device, storage, size, 0, PROMPT_BATCH).total


def check_rewinds(declaration: Declaration, file: GGUFFile) -> None:
    """Raise EngineError if a draft model is recurrent and so cannot roll back rejected tokens."""
    if any(isinstance(state, RecurrentState) for state in declaration.states):
        raise EngineError(
            "{file} cannot be a draft model: its recurrent layers cannot roll back rejected"
            " tokens.",
            "Choose a model that uses only attention.",
            file=file.path.name,
        )
