"""Base classes of vision encoders, and their sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from engine.model.forward.operands import GELU, SILU, Activation, RopeParams, RopeStyle
from engine.model.layers.block import per_layer_width
from engine.model.layers.ffn import separate
from engine.model.layers.linear import Linear
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, Norm, RMSNorm
from engine.model.sharding.placement import Replicate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.model.layers.hparams import HParams
    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps
    from engine.vision.images.resizing import Channels, ImageProcessor


WHOLE = Replicate((0,))  # placement of an encoder's tensors: whole on a single rank


class TextModel(NamedTuple):
    """Architecture and width of an encoder's text model, and whether the model has per-layer
    inputs."""

    architecture: str
    n_embd: int
    has_layer_inputs: bool = False

    @classmethod
    def of(cls, hp: HParams) -> TextModel:
        """Return the description of a model with these sizes."""
        return cls(hp.architecture, hp.n_embd, per_layer_width(hp) > 0)


@dataclass(frozen=True, slots=True)
class VisionHParams:
    """Sizes of an encoder, read from its file.

    Attributes:
        image: side length of the training images, in pixels.
        patch: side length of a patch, in pixels.
        eps: epsilon of its norms.
        mean, std: see `ImageProcessor`.
        act: activation of its FFNs.
        n_text: width of the text model.
    """

    image: int
    patch: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    eps: float
    mean: Channels
    std: Channels
    act: Activation
    n_text: int

    @classmethod
    def read(cls, keys: Keys, n_text: int, *, has_blocks: bool = True) -> Self:
        """Read the sizes of a file.

        Args:
            has_blocks: whether the encoder has blocks; if not, their sizes are zero.

        Raises:
            InvalidGGUF: sizes are missing or contradict each other.
        """
        sizes = cls(
            image=keys.integer("vision.image_size"),
            patch=keys.integer("vision.patch_size"),
            n_embd=keys.integer("vision.embedding_length"),
            n_ff=keys.integer("vision.feed_forward_length"),
            n_layer=keys.integer("vision.block_count"),
            n_head=keys.integer("vision.attention.head_count"),
            eps=keys.number("vision.attention.layer_norm_epsilon"),
            mean=_channels(keys, "vision.image_mean"),
            std=_channels(keys, "vision.image_std"),
            act=SILU if keys.flag("use_silu", default=False) else GELU,
            n_text=n_text,
        )
        of_blocks = sizes.n_layer, sizes.n_ff, sizes.n_head
        are_bad = has_blocks and (not all(of_blocks) or sizes.n_embd % sizes.n_head)
        if are_bad or sizes.image < sizes.patch:
            raise keys.invalid("the sizes of its vision encoder contradict each other")
        if min(sizes.std) <= 0:
            raise keys.invalid("the standard deviations of its colour channels are not positive")
        return sizes

    @property
    def n_side(self) -> int:
        """Number of patches along a side of a training image."""
        return self.image // self.patch

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.n_embd // self.n_head

    def check_rotation(self, keys: Keys) -> None:
        """Check that heads support 2D RoPE.

        Raises:
            InvalidGGUF: they do not.
        """
        if self.head_dim % 4:
            raise keys.invalid("the heads of its vision encoder do not fit 2D RoPE")


def _channels(keys: Keys, name: str) -> Channels:
    red, green, blue = keys.numbers(name, 3, 0.5)
    return red, green, blue


class VisionEncoder(Module, ABC):
    """A vision encoder, which turns an image's pixels into embeddings for its text model.

    `architectures` lists supported text models; `rule` describes the preprocessing of images and
    their representation in prompts.
    """

    architectures: ClassVar[tuple[str, ...]]
    sizes: VisionHParams
    rule: ImageProcessor

    @abstractmethod
    def __init__(self, keys: Keys, text: TextModel) -> None:
        """Declare a file's encoder for a text model."""

    @abstractmethod
    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        """Return the features (tokens, n_text) for normalised pixels (3, height, width)."""

    @classmethod
    def adapt(cls, source: TensorSource, keys: Keys) -> None:
        """Rename and split tensors of `source` to match the names that encoders declare."""
        n_layer = keys.integer("vision.block_count")
        n_embd, n_ff = (keys.integer(f"vision.{x}_length") for x in ("embedding", "feed_forward"))
        down = source.tensors.get("v.blk.0.ffn_down.weight")
        is_exchanged = down is not None and n_embd != n_ff and down.shape == (n_ff, n_embd)
        for block in (f"v.blk.{layer}." for layer in range(n_layer)):
            parts = tuple((f"{block}attn_{part}", n_embd) for part in "qkv")
            separate(source, f"{block}attn_qkv", parts, (n_embd,))
            if is_exchanged:
                _exchange_ffn(source, block)


def _exchange_ffn(source: TensorSource, block: str) -> None:
    for kind in ("weight", "bias"):
        names = [f"{block}ffn_{part}.{kind}" for part in ("up", "down")]
        if all(name in source.tensors for name in names):
            up, down = (source.tensors[name] for name in names)
            source.tensors |= {names[0]: down, names[1]: up}


N_CHANNELS = 3


class PatchEmbedding(Linear):
    """Convolution over non-overlapping patches, as a product with their pixels."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.kernel = (N_CHANNELS, sizes.patch, sizes.patch)
        super().__init__(N_CHANNELS * sizes.patch**2, sizes.n_embd, WHOLE)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        source.get(f"{name}.weight", (self.shape[0], *self.kernel))
        weight = source.get(f"{name}.weight", self.shape, (self.shape[0], *self.kernel))
        slots = [Slot(self, "weight", weight, WHOLE, is_matrix=True)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:1])
            slots.append(Slot(self, "bias", bias, WHOLE, is_matrix=False))
        return slots


class TwoFramePatches(PatchEmbedding):
    """Convolution over patches in two frames, both of which are the image."""

    second: Linear

    def __init__(self, sizes: VisionHParams) -> None:
        super().__init__(sizes)
        self.second = Linear(self.shape[1], self.shape[0], WHOLE)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight.1", self.shape, (self.shape[0], *self.kernel))
        other = Slot(self.second, "weight", weight, WHOLE, is_matrix=True)
        return [*super().bind(source, name), other]

    def __call__(self, x: Tensor) -> Tensor:
        """Map patches (T, 3 × patch²) to (T, n_embd)."""
        return super().__call__(x) + self.second(x)


def patches(pixels: Tensor, patch: int) -> Tensor:
    """Return the patches of pixels (3, height, width), row by row: (rows, columns, 3 × patch²)."""
    n, height, width = pixels.shape
    cut = pixels.reshape(n, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 0, 2, 4).reshape(height // patch, width // patch, -1)


def in_blocks(x: Tensor, n: int) -> Tensor:
    """Return x (rows, columns, ...) reordered into n × n squares, (T, ...).

    Squares, and the elements within each, are in row-major order.
    """
    rows, columns, *rest = x.shape
    blocks = x.reshape(rows // n, n, columns // n, n, -1).permute(0, 2, 1, 3, 4)
    return blocks.reshape(-1, *rest)


class Rotation(NamedTuple):
    """Rotation angles of queries and keys: cosines and sines (T, 1, head_dim / 2)."""

    cos: Tensor
    sin: Tensor
    style: RopeStyle


def grid_places(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return the row and column of each patch, (rows, columns, 2), on the device of `like`."""
    return like.new_ones(rows, columns).nonzero().reshape(rows, columns, 2)


def rotation(axes: Sequence[RopeParams], places: Tensor, ops: VisionOps) -> Rotation:
    """Return the rotation of patches at places (T, 2); half of the pairs rotate by row, half by
    column."""
    both = [ops.rope_angles(axis, None, places[:, i]) for i, axis in enumerate(axes)]
    cos, sin = (ops.concat(*parts) for parts in zip(*both, strict=True))
    return Rotation(cos, sin, axes[0].style)


class VisionBlock(Module):
    """Block of a vision transformer: `x + attention(ln1(x))`, then `x + ffn(ln2(x))`."""

    linear_type: ClassVar[type[Linear]] = Linear
    norm_type: ClassVar[type[Norm]] = LayerNorm
    is_gated: ClassVar[bool] = False

    def __init__(self, sizes: VisionHParams) -> None:
        n, self.n_head, self.act = sizes.n_embd, sizes.n_head, sizes.act
        linear = self.linear_type
        self.ln1 = self.norm_type(n, sizes.eps, WHOLE)
        self.attn_q, self.attn_k, self.attn_v = (linear(n, n, WHOLE) for _ in range(3))
        self.attn_out = linear(n, n, WHOLE)
        self.ln2 = self.norm_type(n, sizes.eps, WHOLE)
        if self.is_gated:
            self.ffn_gate = linear(n, sizes.n_ff, WHOLE)
        self.ffn_up = linear(n, sizes.n_ff, WHOLE)
        self.ffn_down = linear(sizes.n_ff, n, WHOLE)

    def __call__(
        self, x: Tensor, ops: VisionOps, turn: Rotation | None = None, windows: Sequence[int] = ()
    ) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's.

        Queries and keys are rotated by `turn`. `windows` are the sizes of consecutive groups of
        patches that attend only to each other; () for full attention.
        """
        x = x + self.attended(self.ln1.apply(x, ops), ops, turn, windows)
        return x + self.fed(self.ln2.apply(x, ops), ops)

    def attended(
        self, x: Tensor, ops: VisionOps, turn: Rotation | None, windows: Sequence[int]
    ) -> Tensor:
        """Return the attention's output for the normed stream x."""
        q, k, v = (part.reshape(len(x), self.n_head, -1) for part in self.projected(x, ops))
        if turn is not None:
            q, k = ops.ropes((q, k), *turn)
        return self.attn_out(ops.attend_all(q, k, v, windows).flatten(1))

    def projected(self, x: Tensor, ops: VisionOps) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the normed stream x, each (T, n_embd)."""
        return self.attn_q(x), self.attn_k(x), self.attn_v(x)

    def fed(self, x: Tensor, ops: VisionOps) -> Tensor:
        """Return the FFN's output for the normed stream x."""
        up = self.ffn_up(x)
        if self.is_gated:
            return self.ffn_down(ops.gated(self.act, self.ffn_gate(x), up))
        return self.ffn_down(ops.activate(self.act, up))


class GatedBlock(VisionBlock):
    """Block with RMS norms and a gated FFN."""

    norm_type = RMSNorm
    is_gated = True


class MLP(Module):
    """Two linear maps with GELU between them; subclasses set the maps' names in files."""

    def __init__(self, n_in: int, n_between: int, n_out: int) -> None:
        self.fc1 = Linear(n_in, n_between, WHOLE)
        self.fc2 = Linear(n_between, n_out, WHOLE)

    def __call__(self, x: Tensor, ops: VisionOps) -> Tensor:
        """Map x (tokens, n_in) to (tokens, n_out)."""
        return self.fc2(ops.gelu_erf(self.fc1(x)))
