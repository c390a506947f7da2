"""Answers of one model to prompts and chats, as steps to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.errors import EngineError, PromptError
from engine.generation.generate import Generation, fitting_tokens
from engine.generation.results import ContextShifted

if TYPE_CHECKING:
    from engine.config.sampling import SamplingParams
    from engine.generation.prompts import Prompt, Prompts
    from engine.generation.work import Steps
    from engine.text.messages import ChatMessage

MOST_LOGPROBS = 20
"""Largest `Generate.n_logprobs`, as OpenAI's API has it."""


class Asked(Protocol):
    """What is asked: see `engine.events.Generate`, which is above this package."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]: ...

    @property
    def prompt(self) -> str | None: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def continue_last(self) -> bool: ...

    @property
    def begun(self) -> tuple[int, ...]: ...

    @property
    def timed_every(self) -> int: ...

    @property
    def thinks(self) -> bool | None: ...

    @property
    def effort(self) -> str: ...

    @property
    def n_logprobs(self) -> int | None: ...

    @property
    def suffix(self) -> str: ...


class Answers:
    """Maker of the answers of one model; they hold nothing of the model but its prompts.

    Args:
        n_ctx: size of the context in tokens.
        is_marked: whether it matters where prompts of the same chat may part, see `Prompt.marks`.
    """

    def __init__(self, prompts: Prompts, n_ctx: int, *, is_marked: bool) -> None:
        self._prompts, self._n_ctx, self._is_marked = prompts, n_ctx, is_marked

    def plain(self, prompt: str | Sequence[int], params: SamplingParams, timed_every: int) -> Steps:
        """Continue a text or token ids; see `Model.generate`."""
        yield from self._run(self._prompts.plain(prompt), params, timed_every)

    def to(self, request: Asked) -> Steps:
        """Answer a `Generate` command."""
        if request.prompt is not None:
            if request.suffix:
                plain = self._prompts.fill_in(request.prompt, request.suffix)
            else:
                plain = self._prompts.plain(request.prompt)
            yield from self._run(
                plain, request.sampling, request.timed_every, n_logprobs=request.n_logprobs
            )
            return
        if request.suffix:
            raise PromptError("A suffix goes with a prompt, not with messages.")
        template = self._prompts.template
        stops = template.stop_strings  # a plain template has no end token of its own
        sampling = replace(request.sampling, stop=(*request.sampling.stop, *stops))
        begun, text = tuple[int, ...](), ""
        if request.continue_last and request.messages:
            text = request.messages[-1].content
            begun = fitting_tokens(request.begun, text, self._prompts.tokenizer, sampling.stop)
        prompt = self._prompts.chat(
            request.messages,
            self._n_ctx,
            continue_last=request.continue_last,
            is_shortened=request.sampling.on_overflow == "shift",
            begun=begun,
            thinks=request.thinks,
            effort=request.effort,
            is_marked=self._is_marked,
        )
        if prompt.n_dropped:
            yield ContextShifted(prompt.n_dropped)
        yield from self._run(prompt, sampling, request.timed_every, begun, text, request.n_logprobs)

    def _run(
        self, prompt: Prompt, params: SamplingParams, timed_every: int, begun: Sequence[int] = (),
        said: str = "", n_logprobs: int | None = None,
    ) -> Steps:  # fmt: skip
        if timed_every < 0:
            raise EngineError("Tokens cannot be timed at a negative interval.", "Use 0 for none.")
        if n_logprobs is not None and not 0 <= n_logprobs <= MOST_LOGPROBS:
            raise EngineError(
                f"Probabilities of {n_logprobs} tokens cannot be told at each place.",
                f"Ask for 0 to {MOST_LOGPROBS}.",
            )
        generation = Generation(
            self._n_ctx, self._prompts.found, params, prompt.n_keep, timed_every, begun, said,
            n_logprobs,
        )  # fmt: skip
        yield from generation.run(prompt.ids, prompt.marks)
