"""Forward passes of all ranks of a model: many tokens at once, and single ones, which repeat."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import CommError, EngineError
from engine.hardware.backend_choice import captures_tokens
from engine.runtime.micro_batches import LEAST_ROWS, micro_batches_pay
from engine.runtime.rank import Rank, Replay, warm_rows

if TYPE_CHECKING:
    from engine.gpu.decode.rank_capture import OneShotControl
    from engine.gpu.decode.sampling import WordExchange
    from engine.gpu.decode.token_stream import TokenStep
    from engine.parallel.executor import RankExecutor
    from engine.sampling.token_source import Logits, TokenSource

log = logging.getLogger(__name__)


class ModelRunner:
    """Computes tokens on all ranks of one model.

    A single token takes the same operations as the one before, so it is recorded: natively where
    all ranks use the CPU's kernels (`engine.cpu.recorder`), else by ranks on GPUs, as a graph, in
    parts where they meet the others in Python (`engine.gpu.decode.rank_capture`).

    Attributes:
        executor: the threads of the ranks.
        ranks: in rank order; empty once closed.
        stream: draws tokens where they are computed; None where the host draws all.
        one_shots: one-shot all-reduces in which the ranks' kernels meet; None without, or retired.
        n_single: tokens that were computed singly since there was last nothing to repeat.
    """

    def __init__(
        self, executor: RankExecutor, n_vocab: int, n_ctx: int, *, can_rewind: bool
    ) -> None:
        self.ranks: list[Rank] = []
        self.stream: TokenSource | None = None
        self.one_shots: OneShotControl | None = getattr(executor.group, "one_shots", None)
        self.n_single = 0
        self.executor = executor
        self._n_vocab, self._n_ctx, self._can_rewind = n_vocab, n_ctx, can_rewind
        self._refusal = ""
        self._in_micro_batches = False

    @property
    def has_kernels(self) -> bool:
        """Whether there is something to record."""
        return any(rank.backend.records or rank.backend.captures for rank in self.ranks)

    @property
    def _captures(self) -> bool:
        return any(rank.backend.captures for rank in self.ranks)

    @property
    def _recorded(self) -> int:
        """Which of the tokens that are computed singly is recorded.

        On GPUs what is recorded is computed without that before, in any case.
        """
        return 1 if self._captures else 2

    def warm_up(self, n_batch: int) -> None:
        """Compile, record and measure now what the first tokens and the first prompt wait for.

        Where kernels of ranks wait for each other in vain, the ranks do without that.
        """
        if not self.has_kernels:
            return
        try:
            self._warm_up(n_batch)
        except CommError as error:
            if self.executor.lost or not self._retire_one_shots(str(error)):
                raise
            self._warm_up(n_batch)

    def _warm_up(self, n_batch: int) -> None:
        for _ in range(self._recorded):
            self.compute([0], 0, 0)
        if any(rank.backend.compiles for rank in self.ranks):
            for n in warm_rows(min(self._n_ctx, n_batch)):
                self.compute([0] * n, 0, n - 1)
            self._try_micro_batches(min(self._n_ctx, n_batch))
        for rank in self.ranks:
            rank.backend.prepare()

    def compute(self, ids: Sequence[int], n_past: int, first_logit: int) -> Logits:
        """Run tokens after `n_past` cached ones.

        Returns:
            (len(ids) - first_logit, n_vocab)

        Raises:
            EngineError: see `Runtime.forward`.
        """
        is_single = len(ids) == 1 and self.has_kernels
        self.n_single += is_single and captures_tokens()
        if is_single and all(rank.recording for rank in self.ranks):
            return self._read(lambda: self._repeated(ids[0], n_past))
        if is_single and self.n_single == self._recorded and not self._refusal:
            logits = self._read(lambda: self._recorded_now(ids[0], n_past))
            self.draw_on_device(n_past + 1)
            return logits
        return self._read(lambda: self._computed(ids, n_past, first_logit))

    def _try_micro_batches(self, n: int) -> None:
        """Find out whether batches of n tokens take less time in halves, from now on."""
        if n < LEAST_ROWS or not any(rank.micro_batches for rank in self.ranks):
            return

        def compute(in_micro_batches: bool) -> None:
            self._in_micro_batches = in_micro_batches
            self.compute([0] * n, 0, n - 1)

        self._in_micro_batches = micro_batches_pay(compute)

    def _computed(self, ids: Sequence[int], n_past: int, first_logit: int) -> Tensor:
        whole, n = torch.tensor(ids), len(ids)
        in_micro_batches = self._in_micro_batches and n >= LEAST_ROWS and n // 2 <= first_logit
        ranks = self.ranks
        return self._one(
            lambda rank: ranks[rank].compute(
                whole, n_past, first_logit, in_micro_batches=in_micro_batches
            )
        )

    def _one(self, compute: Callable[[int], Tensor | None]) -> Tensor:
        """The logits, which one rank has."""
        return _one(self.executor.run(compute, is_watched=True))

    def _repeated(self, token: int, n_past: int) -> Tensor:
        ranks = self.ranks
        kept = [rank.recording for rank in ranks]  # a lost rank may still read what others show
        replays = [x for x in kept if isinstance(x, Replay)]
        if len(replays) < len(ranks):
            return self._one(lambda rank: ranks[rank].repeat(token, n_past) if kept else None)
        if self.is_captured_whole:
            self.start(token, n_past)
        else:
            self.executor.run(lambda rank: ranks[rank].restart(token, n_past), is_watched=True)
        if len(ranks) > 1:
            self.executor.wait()  # what one of them shows may be made by all
        return _one([replay.result for replay in replays])

    @property
    def is_captured_whole(self) -> bool:
        """A token is one graph on each of the devices."""
        found = [rank.recording for rank in self.ranks]
        return bool(found) and all(isinstance(x, Replay) and x.is_whole for x in found)

    def start(self, token: int, n_past: int) -> None:
        """Start a token on all devices, from this thread, if it is captured whole."""
        ranks = self.ranks
        self.executor.call_inline(lambda rank: ranks[rank].begin(token, n_past))
        self.executor.call_inline(lambda rank: ranks[rank].start())

    def _read(self, compute: Callable[[], Tensor]) -> Logits:
        """The logits that it gives, if all ranks have met as they should.

        Raises:
            CommError: one did not, or does not come to an end.
        """
        try:
            found: Logits = compute().cpu().numpy()
            problem = self.one_shots.problem() if self.one_shots else None
            if problem is not None:
                raise problem
        except BaseException:
            self.recover()
            raise
        return found

    def _recorded_now(self, token: int, n_past: int) -> Tensor:
        """Compute a token and record it, in whichever way is possible."""
        ranks = self.ranks
        if not self._captures:
            return self._one(lambda rank: ranks[rank].record(token, n_past))
        from engine.gpu.decode.rank_capture import Unproven, capture_on_all
        from engine.gpu.launch.graph import NotRepeatable

        while True:
            tasks = [rank.capture_task(token, n_past) for rank in ranks]
            try:
                replays, results = capture_on_all(self.executor, tasks, self.one_shots)
            except NotRepeatable as error:
                if not isinstance(error, Unproven) or not self._retire_one_shots(str(error)):
                    self._refuse(str(error))
                    return self._computed([token], n_past, 0)
            else:
                for rank, part in zip(ranks, replays.parts, strict=True):
                    rank.recording, rank.refusal = Replay(part), ""
                return _one(results)

    def _retire_one_shots(self, why: str) -> bool:
        """Let kernels meet no more; whether they did before."""
        if self.one_shots is None:
            return False
        self.one_shots.retire(why)
        self.one_shots = None
        return True

    def _refuse(self, why: str) -> None:
        log.warning("tokens are computed step by step: %s", why)
        self._refusal = why
        for rank in self.ranks:
            rank.refusal = why

    def draw_on_device(self, n_past: int) -> None:
        """Have tokens drawn where they are computed, if ranks on GPUs do all.

        Args:
            n_past: cached tokens, which stay, as states do.
        """
        holders = [rank for rank in self.ranks if not rank.is_idle]
        is_sure = all(
            rank.backend.captures and rank.recording and not rank.refusal for rank in holders
        )
        if self.stream is not None or n_past >= self._n_ctx or not captures_tokens() or not is_sure:
            return
        from engine.gpu.decode.token_stream import TokenStream
        from engine.gpu.launch.graph import NotRepeatable

        steps, me = self._token_steps(tuple(rank.number for rank in holders)), weakref.ref(self)
        if not steps:
            return
        try:
            stream = TokenStream(steps, self.executor, self.one_shots, lambda: _recover(me()))
            stream.prepare(0, n_past)
        except (EngineError, NotRepeatable) as error:
            if self.executor.lost:
                self.close()
                raise
            log.warning("tokens are drawn by the host: %s", error)
        else:
            self.stream = stream

    def _token_steps(self, holders: tuple[int, ...]) -> list[TokenStep | None]:
        """How each rank takes part in drawing tokens; none where they cannot tell each other."""
        one_shots: dict[int, WordExchange] = {}
        if len(holders) > 1 and self.one_shots is not None:
            found = {rank: self.one_shots.one_shot(rank, holders) for rank in holders}
            one_shots = {rank: one_shot for rank, one_shot in found.items() if one_shot is not None}
        if len(one_shots) < len(holders) > 1:
            return []
        return [
            rank.token_step(self._n_vocab, one_shots.get(rank.number), can_rewind=self._can_rewind)
            for rank in self.ranks
        ]

    def recover(self) -> None:
        """Be usable again after something has failed, perhaps in the middle of a token.

        If a rank is lost, be closed.
        """
        self.forget()
        if self.executor.lost:
            self.close()
        else:
            self.executor.reset()

    def forget(self) -> None:
        """Have nothing to repeat."""
        self.n_single = 0
        self.stream = None
        for rank in self.ranks:
            rank.recording = None

    def close(self) -> None:
        """Free everything; safe to call twice.

        What a lost rank uses is freed when its thread comes back.
        """
        self.forget()
        for rank in self.ranks:
            if rank.number not in self.executor.lost:
                rank.close()
        self.ranks.clear()  # what a lost rank was told to do knows this list as well


def _one(found: Sequence[Tensor | None]) -> Tensor:
    """What one rank has."""
    (logits,) = (x for x in found if x is not None)
    return logits


def _recover(runner: ModelRunner | None) -> None:
    if runner is not None:
        runner.recover()
