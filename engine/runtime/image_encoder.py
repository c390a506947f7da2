"""A vision encoder on one device, with a cache for recent results."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.reference.backend import Backend
from engine.backends.reference.weights import PackedWeight
from engine.errors import OutOfDeviceMemory, Sentence
from engine.formats.gguf.reader import GGUFFile, model_hash
from engine.hardware.faults import explain_faults
from engine.hardware.torch_devices import free_bytes, is_out_of_memory
from engine.planning.footprint import held_bytes
from engine.runtime.loader import ByteProgress, check_types, load_rank
from engine.util.progress import IsCancelled, ignore, never
from engine.vision.encoders.ops import VisionOps, product
from engine.vision.encoders.registry import STORAGE, declare_vision_encoder, work_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.model.layers.module import Slot
    from engine.vision.encoders.base import TextModel
    from engine.vision.images.placed import PromptImage
    from engine.vision.images.resizing import ImageProcessor

MAX_KEPT_BYTES = 256 << 20
"""Maximum size of cached results, in bytes; this is enough for hundreds of images."""

LEVELS = 255.0
"""Maximum value of a pixel's channel."""


class PictureWeight(PackedWeight):
    """A packed matrix in a vision encoder, which multiplies all patches of an image together."""

    @classmethod
    def take_over(cls, slots: Sequence[Slot]) -> None:
        """Replace the packed matrices in slots by matrices of this class."""
        for slot in slots:
            held = getattr(slot.owner, slot.attribute)
            if isinstance(held, PackedWeight):
                setattr(slot.owner, slot.attribute, cls(held.raw, held.type_number, held.columns))

    def _product(self, x: Tensor, rows: Tensor) -> Tensor:
        return product(x, rows)


class ImageEncoder:
    """The vision encoder of an mmproj file on one device.

    Args:
        path: path of the file.
        device: name of the device.
        text: the language model.
        is_cancelled: polled; returning True stops the load.
        n_threads: number of CPU threads for encoding, if the device is the CPU.

    Attributes:
        rule: image processor for prompts.
        hash: hash of the file; see `model_hash`.
        n_bytes: size of its weights in bytes.
        n_encoded: number of images encoded so far.

    Raises:
        EngineError: the file does not fit the model, the device is full, or the load was cancelled.
    """

    def __init__(
        self, path: str, device: str, text: TextModel, is_cancelled: IsCancelled, n_threads: int = 1
    ) -> None:
        self.device = device
        self.n_encoded = 0
        self._n_threads = n_threads
        self._torch_device = torch.device(device)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._ops = VisionOps()
        with GGUFFile.open(path) as file:
            declaration = declare_vision_encoder(file, text)
            self._tower = declaration.encoder
            self.rule: ImageProcessor = declaration.encoder.rule
            self.hash = model_hash(file)
            check_types(str(file.path), declaration.slots)
            slots = declaration.slots
            self.n_bytes = sum(held_bytes(slot, 0, STORAGE) for slot in slots)
            progress = ByteProgress(self.n_bytes, ignore, is_cancelled)
            with self._explaining(Sentence("to load the vision encoder")):
                load_rank(file, slots, 0, self._torch_device, STORAGE, Backend(), progress)
        PictureWeight.take_over(slots)

    def has(self, image: PromptImage) -> bool:
        """Return whether the result for an image is cached."""
        return image.number in self._kept

    def encode(self, image: PromptImage, is_cancelled: IsCancelled = never) -> Tensor:
        """Return an image's features in host memory, (tokens, n_text); cache recent ones.

        Args:
            is_cancelled: polled in each block of the encoder; returning True stops the work.

        Raises:
            EngineError: the device is full or lost, or the work was cancelled.
        """
        features = self._kept.pop(image.number, None)
        if features is None:
            self._ops.is_cancelled = is_cancelled
            with self._explaining(Sentence("to encode an image")), torch.inference_mode():
                self._use_threads()
                features = self._tower.encode(self._normalised(image), self._ops).cpu()
            self.n_encoded += 1
        self._kept[image.number] = features
        while len(self._kept) > 1 and sum(x.nbytes for x in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return features

    def _use_threads(self) -> None:
        """Let torch use all threads; the model's next pass sets its own thread count."""
        if self._torch_device.type == "cpu" and torch.get_num_threads() != self._n_threads:
            torch.set_num_threads(self._n_threads)

    def _normalised(self, image: PromptImage) -> Tensor:
        pixels = torch.tensor(image.pixels).to(self._torch_device).float() / LEVELS
        mean, std = (pixels.new_tensor(numbers) for numbers in (self.rule.mean, self.rule.std))
        return ((pixels - mean) / std).permute(2, 0, 1)

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        try:
            with explain_faults([self._torch_device]):
                yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            free = free_bytes([self.device])[self.device]
            needed = max(work_bytes(self._tower), free + 1)
            raise OutOfDeviceMemory(self.device, needed, free, doing) from None
