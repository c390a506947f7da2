"""Description of a model file; imports no file reader, so that the window opens quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model.sharding.split import SplitPart


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model file.

    Attributes:
        architecture: `general.architecture`, or "unknown".
        supported: whether Tandem can run the architecture.
        n_embd: width of the hidden state.
        n_head, n_head_kv: number of query and key-value heads; the maximum if layers differ.
        n_ctx_train: context length in training.
        n_bytes: size of all parts of the file.
        quant: common name of the quantisation, for example "Q4_K_M".
        tensor_types: pairs of a type name and the number of such tensors, most frequent first.
        sampling: pairs of a `SamplingParams` field and the value that the file recommends.
        can_think: whether the chat template has a switch for thinking.
        has_effort: whether the chat template supports a thinking effort.
        has_thoughts: whether the chat template has thinking tags; also true for models that always
            think.
        has_mtp: whether this file or one in its folder has an MTP block.
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
    """Description of a tensor in a file; `shape` has the slowest dimension first."""

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The complete header of a file in readable form.

    Attributes:
        version: version of the GGUF format.
        files: paths of all parts.
        metadata: pairs of a key and a short form of its value, in file order.
        tensors: tensors in file order.
        warnings: known problems with the loaded model.
        problem: error that loading would raise; empty if none is known.
        parts: parts of the model and how finely each can be split; empty if there is a problem.
    """

    info: ModelInfo
    version: int
    files: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    tensors: tuple[TensorSummary, ...]
    warnings: tuple[str, ...]
    problem: str
    parts: tuple[SplitPart, ...]
