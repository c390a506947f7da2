"""What a model file is; imports no reader of files, so that the window starts at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model.sharding.split import SplitPart


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model file.

    Attributes:
        path: path of the file.
        name: name of the model.
        architecture: `general.architecture`, or "unknown".
        supported: whether Tandem can run the architecture.
        n_layer: number of layers.
        n_embd: width of the hidden state.
        n_head, n_head_kv: number of query and key-value heads; the largest if layers differ.
        n_vocab: number of tokens.
        n_ctx_train: context length that it was trained for.
        n_params: number of parameters.
        n_bytes: size of the file, with all its parts.
        quant: common name of the file's quantisation, such as "Q4_K_M".
        has_chat_template: whether the file has a chat template.
        tensor_types: pairs of a type name and its number of tensors, most used first.
        sampling: pairs of a field of `SamplingParams` and the value that the file recommends.
        can_think: whether the chat template asks if the model shall think before it answers.
        has_effort: whether the chat template asks how much the model shall think.
        has_thoughts: whether the chat template knows marks of thinking, as that of a model has
            that always thinks.
        has_mtp: whether a block that guesses tokens (MTP) is in the file, or in one beside it.
    """

    path: str
    name: str
    architecture: str
    supported: bool
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    n_bytes: int
    quant: str
    has_chat_template: bool
    tensor_types: tuple[tuple[str, int], ...]
    sampling: tuple[tuple[str, float], ...] = ()
    can_think: bool = False
    has_effort: bool = False
    has_thoughts: bool = False
    has_mtp: bool = False


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Description of a tensor of a file; `shape` has the slowest dimension first."""

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The whole header of a file, for people.

    Attributes:
        info: description of the model.
        version: version of the GGUF format.
        files: paths of all parts.
        metadata: pairs of a key and a short text of its value, in file order.
        tensors: tensors in file order.
        warnings: sentences on what will be wrong with the loaded model.
        problem: sentence with which loading would fail; empty if none is known.
        parts: parts of the model and how finely each can be cut; empty with a problem.
    """

    info: ModelInfo
    version: int
    files: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    tensors: tuple[TensorSummary, ...]
    warnings: tuple[str, ...]
    problem: str
    parts: tuple[SplitPart, ...]
