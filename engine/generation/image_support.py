"""The encoder of pictures of a loaded model: opened with it, and kept beside its re-splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.generation.image_prompts import PictureReader
from engine.hardware.devices.host import usable_cores
from engine.model.forward.batch import MAX_AT_ONCE
from engine.runtime.image_encoder import ImageEncoder
from engine.vision.encoders.base import TextModel
from engine.vision.images.placed import VisionInfo

if TYPE_CHECKING:
    from engine.generation.prompts import Prompts
    from engine.generation.scheduler import Scheduler
    from engine.load_params import LoadParams
    from engine.runtime.thread_runtime import ThreadRuntime
    from engine.util.progress import IsCancelled


class PictureSupport:
    """Encoder of pictures of a loaded model, if an mmproj file is loaded with it.

    Args:
        params: settings of the load.
        runtime: ranks of the model.
        prompts: writer of the model's prompts, which reads pictures from now on.
        scheduler: scheduler of the model's answers, which has pictures encoded from now on.
        is_cancelled: asked again and again; returning True ends the loading.

    Attributes:
        encoder: the encoder; None where the model cannot see.
        warnings: sentences for a person.

    Raises:
        EngineError: the file cannot be used with the model, the device is full, or it was
            cancelled.
    """

    def __init__(
        self, params: LoadParams, runtime: ThreadRuntime, prompts: Prompts, scheduler: Scheduler,
        is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        self._prompts, self._scheduler = prompts, scheduler
        self._n_threads = params.cpu_threads or usable_cores()
        self.encoder: ImageEncoder | None = None
        self.warnings: tuple[str, ...] = ()
        if runtime.left_pictures:
            self.warnings = ("There is no memory left for pictures, so the model reads text only.",)
        try:
            self._open(runtime, is_cancelled)
        except EngineError as error:
            if params.mmproj != "auto" or is_cancelled():
                raise
            self.warnings = (f"The model reads text only: {error.message}",)

    def _open(self, runtime: ThreadRuntime, is_cancelled: IsCancelled) -> None:
        self.encoder = self._prompts.pictures = self._scheduler.runner.encoder = None
        device = runtime.plan.pictures_device
        if not device:
            return
        text = TextModel.of(runtime.hp)
        encoder = ImageEncoder(runtime.mmproj, device, text, is_cancelled, self._n_threads)
        rule = encoder.rule
        n_least = rule.most_tokens + MAX_AT_ONCE
        if rule.is_two_way and runtime.n_batch < n_least:
            raise EngineError(
                f"Pictures of this model need batches of at least {n_least} tokens; they have"
                f" {runtime.n_batch}.",
                "Load it with larger batches of prompts, or without pictures.",
            )
        self.encoder = encoder
        self._prompts.pictures = PictureReader(VisionInfo(runtime.mmproj, rule), encoder.hash)
        self._scheduler.runner.encoder = encoder
        runtime.note_beside("pictures", encoder.n_bytes)

    def make_way(self, runtime: ThreadRuntime, params: LoadParams) -> None:
        """Free the encoder before a re-split behind which it lies on another device."""
        if self.encoder is not None and self.encoder.device not in params.picture_devices:
            self.encoder = self._scheduler.runner.encoder = None
            runtime.note_beside("pictures", 0)

    def attach(self, runtime: ThreadRuntime) -> None:
        """Go on beside a model that was split anew; `make_way` came before.

        A failure is a fallback of the model, which goes on without pictures.
        """
        if not runtime.ranks:  # a failed re-split has closed it
            return
        if self.encoder is not None:
            runtime.note_beside("pictures", self.encoder.n_bytes)
            return
        try:
            self._open(runtime, lambda: False)
        except EngineError as error:
            runtime.fallbacks.report("pictures", [runtime.plan.pictures_device], str(error))
