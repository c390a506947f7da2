"""The engine as a Python library: load a model, ask it, free it. Synchronous, no threads needed.

model = load_model("model.gguf", devices=["cpu", "cpu"], split=[3, 1])
for event in model.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...
model.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

import engine.environment  # noqa: F401 before torch, which reads it
from engine.benchmark import Benchmark, BenchResult, BenchTest
from engine.config import ControlVector, LoadParams, SamplingParams
from engine.devices import parse_devices, parse_target
from engine.errors import EngineError, OutOfDeviceMemory, PromptError, SplitError, TemplateError
from engine.events import (
    ChatMessage,
    ContextShifted,
    DeviceMemory,
    Event,
    Generate,
    LoadProgress,
)
from engine.generate import Generation, Session
from engine.gguf import GGUFFile
from engine.info import ModelInfo, describe
from engine.plan import Plan
from engine.runtime import Logits, Runtime
from engine.text import (
    NO_VOCABULARY,
    ChatTemplate,
    Tokenizer,
    chat_template_from_metadata,
    has_vocabulary,
)

ProgressSink = Callable[[LoadProgress], None]
IsCancelled = Callable[[], bool]
NOTHING: Mapping[str, int] = MappingProxyType({})


def _ignore(_: LoadProgress) -> None:
    pass


def _never() -> bool:
    return False


def load_model(
    path: str | Path,
    devices: Sequence[str] | str = ("cpu",),
    split: Sequence[float] | None = None,
    *,
    n_ctx: int | None = None,
    split_mode: str = "tensor",
    overrides: Sequence[tuple[str, str]] = (),
    kv_type: str = "f16",
    cpu_threads: int | None = None,
    n_batch: int = 512,
    control_vectors: Sequence[tuple[str | Path, float]] = (),
    control_layers: tuple[int, int] | None = None,
    groups: Sequence[int] | None = None,
    n_cpu_blocks: int = 0,
    n_cpu_moe: int = 0,
    kv_on_host: bool = False,
    reserve: Mapping[str, int] = NOTHING,
    on_progress: ProgressSink = _ignore,
    is_cancelled: IsCancelled = _never,
) -> Model:
    """Load a GGUF over one or several ranks.

    Args:
        path: the file, or any part of a split one.
        devices: one entry per rank ("cpu", "cuda:0", …); a repeated one is a virtual device.
        split: relative share of each rank, such as [3, 1]; None is even.
        split_mode: "tensor" cuts every block, "layer" gives whole blocks to ranks, "groups" gives
            whole blocks to groups of ranks and cuts them inside.
        n_ctx: context in tokens; None is 2048, or the model's own if that is less.
        overrides: (regular expression on tensor names, device, or rank as "#0"); that part goes
            there whole.
        kv_type: "f32", "f16", "bf16", "q8_0" or "q4_0".
        cpu_threads: of all CPU ranks together; None is one per physical core.
        n_batch: prompt tokens computed at once.
        control_vectors: (GGUF of the architecture "controlvector", factor) that steer the model.
        control_layers: first and last layer that are steered; None is all but layer 0.
        groups, n_cpu_blocks, n_cpu_moe, kv_on_host: see `LoadParams`.
        reserve: bytes that have to stay free, by device.

    Raises:
        EngineError: the file, the split or a device cannot be used, or it was cancelled.
    """
    params = LoadParams(
        path=str(path),
        devices=tuple(parse_devices(devices)),
        split=None if split is None else _numbers(split),
        split_mode=split_mode,
        n_ctx=n_ctx,
        overrides=tuple((pattern, parse_target(target)) for pattern, target in overrides),
        kv_type=kv_type,
        cpu_threads=cpu_threads,
        n_batch=n_batch,
        control_vectors=tuple(ControlVector(str(p), float(scale)) for p, scale in control_vectors),
        control_layers=control_layers,
        groups=None if groups is None else tuple(groups),
        n_cpu_blocks=n_cpu_blocks,
        n_cpu_moe=n_cpu_moe,
        kv_on_host=kv_on_host,
        reserve=tuple((parse_devices(device)[0], n) for device, n in reserve.items()),
    )
    return Model(params, on_progress, is_cancelled)


class Model:
    """A loaded model.

    Attributes:
        info: what the file says about itself.
        n_ctx: context in tokens.
        n_threads: CPU threads of all ranks together.
        warnings: sentences that a person should see.
        runtime: its ranks; tests and tools look inside.
    """

    def __init__(
        self,
        params: LoadParams,
        on_progress: ProgressSink = _ignore,
        is_cancelled: IsCancelled = _never,
    ) -> None:
        self.params = params
        with GGUFFile.open(params.path) as file:
            self.info: ModelInfo = describe(file)
            self._tokenizer = _tokenizer(file)
            self._template = _template(file, self._tokenizer)
            self.runtime = Runtime(file, params, on_progress, is_cancelled)
        self._session = Session(self.runtime)
        self.n_ctx = self.runtime.n_ctx
        self.n_threads = self.runtime.n_threads
        self.warnings = self.runtime.plan.warnings + self._text_warnings()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def plan(self) -> Plan:
        """How it is split, and what was predicted."""
        return self.runtime.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            PromptError: the file has none.
        """
        if self._tokenizer is None:
            raise PromptError(
                f"{self.info.name} has no vocabulary, so it can neither read nor write text.",
                "Pick a file with a tokenizer.",
            )
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or a plain one if it has none.

        Raises:
            PromptError: the file has no vocabulary.
        """
        if self._template is None:
            _ = self.tokenizer
            raise AssertionError("a tokenizer always comes with a template")
        return self._template

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits after each of `ids`, as a fresh sequence; what was in the cache is forgotten.

        Returns:
            F32 (len(ids), n_vocab)

        Raises:
            PromptError: no tokens, unknown tokens, or more than the context holds.
        """
        ids = [int(i) for i in ids]
        session = self._session
        session.check(ids)
        turn = session.begin()
        session.ids.clear()
        return np.concatenate([session.forward(c, 0, turn) for c in session.chunks(ids)])

    def bench(self, test: BenchTest, repetitions: int = 5, *, warm_up: bool = True) -> BenchResult:
        """Measure how fast prompts or tokens are computed; what was in the cache is forgotten.

        Args:
            warm_up: run it once before, with few tokens to generate, without counting that.

        Raises:
            EngineError: the context is too short for it, or a device failed.
        """
        return Benchmark(self._session, self.runtime).run(test, repetitions, warm_up=warm_up)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 frozen
        is_cancelled: IsCancelled = _never,
    ) -> Iterator[Event]:
        """Continue a text, in which special tokens are recognised, or token ids.

        Yields:
            PrefillProgress, TokenText, ContextShifted, and one Finished at the end.

        Raises:
            EngineError: the prompt cannot be used, or a device failed.
        """
        ids = self._encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        n_keep = 1 if self._tokenizer and self._tokenizer.add_bos else 0
        generation = Generation(self._session, self._tokenizer, params, n_keep, is_cancelled)
        yield from generation.run(ids)

    def answer(self, request: Generate, is_cancelled: IsCancelled = _never) -> Iterator[Event]:
        """Do what a `Generate` command asks; see `generate`."""
        if request.prompt is not None:
            yield from self.generate(request.prompt, request.sampling, is_cancelled)
            return
        if not request.messages:
            raise PromptError("There is no message to answer.", "Write something first.")
        messages, n_keep = list(request.messages), 0
        ids = self._encode_chat(messages, continue_last=request.continue_last)
        if request.sampling.on_overflow == "shift":
            n_before, n_last = len(ids), 1 + request.continue_last
            while len(ids) >= self.n_ctx - self._reserve() and _drop_oldest(messages, n_last):
                ids = self._encode_chat(messages, continue_last=request.continue_last)
            if len(ids) < n_before:
                yield ContextShifted(n_before - len(ids))
            n_keep = self._n_system(messages, ids, continue_last=request.continue_last)
        stops = self.chat_template.stop_strings  # a plain template has no end token of its own
        sampling = replace(request.sampling, stop=(*request.sampling.stop, *stops))
        generation = Generation(self._session, self._tokenizer, sampling, n_keep, is_cancelled)
        yield from generation.run(ids)

    def _reserve(self) -> int:
        """Tokens that a shifted prompt leaves for the answer."""
        return max(1, self.n_ctx // 8)

    def _encode_chat(self, messages: Sequence[ChatMessage], *, continue_last: bool) -> list[int]:
        template = self.chat_template
        turns = [{"role": m.role, "content": m.content} for m in messages]
        last = turns.pop()["content"] if continue_last else ""
        return self._encode(template.render(turns, add_generation_prompt=True) + last)

    def _encode(self, text: str) -> list[int]:
        """Token ids of a prompt: begun once, whoever wrote the beginning, and not ended."""
        tokenizer = self.tokenizer
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        has_bos = bos is not None and text.startswith(tokenizer.token_text(bos))
        ids = tokenizer.encode(text, add_special=not has_bos, parse_special=True)
        if tokenizer.add_eos and not has_bos and ids and ids[-1] == eos:
            ids.pop()
        return ids

    def _n_system(
        self, messages: Sequence[ChatMessage], ids: Sequence[int], *, continue_last: bool
    ) -> int:
        """How many tokens at the start of a chat prompt belong to the system prompt."""
        others = [ChatMessage(m.role, "?") if m.role != "system" else m for m in messages]
        try:
            with_others = self._encode_chat(others, continue_last=continue_last)
        except TemplateError:  # it insists on what the messages say
            return 0
        n = 0
        for a, b in zip(with_others, ids, strict=False):
            if a != b:
                break
            n += 1
        return min(n, self.n_ctx // 2)

    def _text_warnings(self) -> tuple[str, ...]:
        if self._tokenizer is None:
            return (NO_VOCABULARY,)
        warnings = tuple(self._tokenizer.warnings)
        if self.chat_template.is_fallback:
            warnings += ("This model has no chat template: plain text is used instead.",)
        return warnings

    def memory(self) -> list[DeviceMemory]:
        """Predicted and measured bytes of each rank."""
        return self.runtime.memory()

    def close(self) -> None:
        """Free all memory and end the rank threads; safe to call twice."""
        self.runtime.close()


def _numbers(split: Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in split)
    except (TypeError, ValueError):
        raise SplitError(f"The split {split!r} is not a list of numbers.") from None


def _tokenizer(file: GGUFFile) -> Tokenizer | None:
    return Tokenizer.from_metadata(file.meta) if has_vocabulary(file.meta) else None


def _template(file: GGUFFile, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    return None if tokenizer is None else chat_template_from_metadata(file.meta, tokenizer)


def _drop_oldest(messages: list[ChatMessage], n_last: int) -> bool:
    """Remove the oldest question and its answer, but no system prompt and none of the last.

    Returns:
        False if there is nothing to remove.
    """
    for index, message in enumerate(messages[:-n_last]):
        if message.role != "system":
            del messages[index]
            if messages[index].role == "assistant" and index < len(messages) - n_last:
                del messages[index]
            return True
    return False


def replace_model(
    old: Model | None,
    params: LoadParams,
    on_progress: ProgressSink,
    is_cancelled: IsCancelled,
    hold: Callable[[Model | None], None],
    is_closing: IsCancelled = _never,
) -> None:
    """Load a model in place of another, and keep that one if the new one fails.

    Where both fit, the old one is freed last. Where not, it makes room first and is loaded again
    after a failure.

    Args:
        hold: told of every change of what is loaded.
        is_closing: whether bringing back the old model is no longer of use.

    Raises:
        EngineError: the new model was not loaded.
    """
    try:
        new = Model(params, on_progress, is_cancelled)
    except OutOfDeviceMemory:
        if old is None:
            raise
    else:
        hold(new)
        if old is not None:
            old.close()
        return
    hold(None)
    old.close()
    try:
        hold(Model(params, on_progress, is_cancelled))
    except EngineError as error:
        _reload(old, on_progress, hold, error, is_closing)
        raise


def _reload(
    old: Model,
    on_progress: ProgressSink,
    hold: Callable[[Model | None], None],
    error: EngineError,
    is_closing: IsCancelled,
) -> None:
    """Bring back what made room in vain; if even that fails, the hint says so."""
    try:
        hold(Model(old.params, on_progress, is_closing))
    except EngineError:
        lost = f"{old.info.name} was unloaded to make room and could not be loaded again."
        error.hint = f"{error.hint} {lost}".strip()


__all__ = ["Model", "load_model", "replace_model"]
