"""Drafts by a draft model: its likeliest tokens, for all answers in the same passes."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic

import numpy as np

from engine.decoding.drafting.ngram import Answer, DraftTokens, Kind
from engine.errors import EngineError, OutOfDeviceMemory, Sentence, paragraph
from engine.formats.gguf.reader import GGUFFile
from engine.generation.kv_cache import Group, OutOfPages, PagedSequence, PagePool, Sequences
from engine.generation.scheduler import PrefillBudget
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.pages import n_alike
from engine.planning.draft import draft_params
from engine.runtime.model_runner import ModelRunner
from engine.runtime.thread_runtime import ThreadRuntime, open_runtime
from engine.util.progress import IsCancelled, ignore

if TYPE_CHECKING:
    from engine.load_params import LoadParams

KIND = Kind("model", first_share=0.6)
"""Kind of drafts by a draft model."""

MAX_UNSEEN = 16
"""Maximum number of unread tokens, over all texts, to compute with the first drafts; if there are
more, they are read piece by piece beforehand."""


class ModelSource(Generic[Answer]):
    """Drafts by a small model for all running answers, one pass per token.

    It keeps its own cache of the texts; wrong drafts are overwritten.

    Args:
        runtime: the small model; its cache can rewind.
        n_vocab: number of tokens that drafts may use.
        on_failure: called with an error that has stopped drafting.
        turn: returns the context in which the small model computes while the main one does not.
    """

    kind, most = KIND, 0

    def __init__(
        self, runtime: ModelRunner, n_vocab: int, on_failure: Callable[[Exception], None],
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._runtime, self._on_failure, self._turn = runtime, on_failure, turn
        self._n_vocab = min(n_vocab, runtime.n_vocab)
        self._knows_all = n_vocab <= runtime.n_vocab
        groups = [Group(PagePool(group.n_pages), group.window) for group in runtime.groups]
        self._cached = Sequences(groups, lambda *pages: runtime.copy_page(*pages))
        self._readers: dict[Answer, _Reader] = {}
        self._budget = PrefillBudget()
        self._has_failed = False

    def draft(
        self, texts: Mapping[Answer, Sequence[int]], most: int
    ) -> Mapping[Answer, DraftTokens]:
        """Return the model's continuations; see `DraftSource`.

        There are none while it reads long texts piece by piece, for texts that are too long, or
        after a failure.
        """
        if self._has_failed or not all(self._can_read(ids, most) for ids in texts.values()):
            return {}
        try:
            with self._turn():
                found = self._read(texts, most)
        except OutOfPages:
            for answer in [answer for answer in self._readers if answer not in texts]:
                self.forget(answer)  # so that next time there may be room
            return {}
        except Exception as error:  # noqa: BLE001 answers continue without drafts
            self._has_failed = True
            self._on_failure(error)
            return {}
        return {answer: DraftTokens(ids, KIND) for answer, ids in zip(texts, found, strict=False)}

    def n_unread(self, texts: Mapping[Answer, Sequence[int]]) -> int:
        """Return how many tokens of the texts were not computed, excluding each text's last one."""
        readers = ((self._readers.get(answer), ids) for answer, ids in texts.items())
        return sum(len(ids) - (reader.n_seen if reader else 0) - 1 for reader, ids in readers)

    def forget(self, answer: Answer) -> None:
        """Free the pages of an answer, which stay reusable until evicted."""
        reader = self._readers.pop(answer, None)
        if reader is not None:
            reader.close()

    def _read(self, texts: Mapping[Answer, Sequence[int]], most: int) -> list[list[int]]:
        """Return the drafts for each text; none while there is too much to read."""
        readers = [self._reader(answer, ids) for answer, ids in texts.items()]
        if sum(reader.n_unseen for reader in readers) > max(MAX_UNSEEN, len(readers)):
            self._read_on(readers)
            return []
        for reader in readers:
            reader.reserve(most)
        return self._drafted(readers, most)

    def _can_read(self, ids: Sequence[int], most: int) -> bool:
        fits = len(ids) + most <= self._runtime.n_ctx
        return fits and (self._knows_all or max(ids) < self._runtime.n_vocab)

    def _reader(self, answer: Answer, ids: Sequence[int]) -> _Reader:
        """Return a text's reader, whose cache has a prefix of the text."""
        reader = self._readers.get(answer)
        if reader is not None and not reader.follow(ids):
            self.forget(answer)
            reader = None
        if reader is None:
            reader = self._readers[answer] = _Reader(self._cached.open(ids[:-1]))
            reader.follow(ids)
        return reader

    def _read_on(self, readers: Sequence[_Reader]) -> None:
        left = self._budget.n
        for reader in readers:
            while left and reader.n_unseen > 1:
                n = min(reader.n_unseen - 1, left, self._runtime.n_batch)
                begun = time.perf_counter()
                piece = reader.piece(n)
                self._runtime.forward(reader.text[piece.n_past : piece.stop], Batch((piece,), n))
                self._runtime.finish()
                self._budget.note(n, time.perf_counter() - begun)
                reader.note_seen(n)
                left -= n

    def _drafted(self, readers: Sequence[_Reader], most: int) -> list[list[int]]:
        ids, pieces, last = list[int](), list[Piece](), list[int]()
        for reader in readers:
            ids += reader.text[-reader.n_unseen :]
            pieces += reader.singles(reader.n_unseen)
            last.append(len(ids) - 1)
        tokens = self._next(ids, pieces, last)
        for reader in readers:
            reader.note_seen(reader.n_unseen)
        found = [[token] for token in tokens]
        for _ in range(most - 1):
            pieces = [reader.drafted(token) for reader, token in zip(readers, tokens, strict=True)]
            tokens = self._next(tokens, pieces, range(len(tokens)))
            for drafted, token in zip(found, tokens, strict=True):
                drafted.append(token)
        return found

    def _next(
        self, ids: Sequence[int], pieces: Sequence[Piece], rows: Sequence[int]
    ) -> Sequence[int]:
        logits = self._runtime.forward(ids, Batch(tuple(pieces), 0))
        return [int(np.argmax(logits[row, : self._n_vocab])) for row in rows]


class _Reader:
    """The small model's state for one text and its draft.

    Attributes:
        text: all tokens of the text.
    """

    def __init__(self, sequence: PagedSequence) -> None:
        self._sequence = sequence
        self._ahead: list[int] = []  # draft tokens computed beyond the sequence
        self.text: list[int] = []

    @property
    def n_seen(self) -> int:
        return len(self._sequence.ids)

    @property
    def n_unseen(self) -> int:
        return len(self.text) - self.n_seen

    def follow(self, ids: Sequence[int]) -> bool:
        """Continue with a longer or a different text; return False if that is impossible.

        Accepted drafts are cached already.
        """
        self.text, seen = list(ids), self._sequence.ids
        if self.text[: len(seen)] != seen or len(seen) == len(self.text):
            self._ahead = []
            return self._sequence.cut(n_alike(seen, self.text[:-1]))
        n = n_alike(self._ahead, self.text[len(seen) : -1])
        self._sequence.append(self._ahead[:n])
        self._ahead = []
        return True

    def reserve(self, n_ahead: int) -> None:
        self._sequence.reserve(self.n_unseen + n_ahead)

    def piece(self, n: int) -> Piece:
        self._sequence.reserve(n)
        return Piece(len(self._sequence.ids), n, self._tables)

    def singles(self, n: int) -> list[Piece]:
        at, tables = len(self._sequence.ids), self._tables
        return [Piece(at + i, 1, tables) for i in range(n)]

    def drafted(self, token: int) -> Piece:
        self._ahead.append(token)
        return Piece(len(self._sequence.ids) + len(self._ahead) - 1, 1, self._tables)

    def note_seen(self, n: int) -> None:
        at = len(self._sequence.ids)
        self._sequence.append(self.text[at : at + n])

    @property
    def _tables(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table) for table in self._sequence.tables)

    def close(self) -> None:
        self._sequence.close()


log = logging.getLogger(__name__)


class DraftModel(Generic[Answer]):
    """A loaded draft model, on a single device.

    Args:
        params: the main model's settings.
        main: the main model's ranks.
        is_cancelled: polled; returning True stops the load.

    Attributes:
        device: name of the draft model's device.
        source: the draft model's drafts.

    Raises:
        EngineError: the file cannot be used, the device is full, or the load was cancelled.
    """

    def __init__(self, params: LoadParams, main: ThreadRuntime, is_cancelled: IsCancelled) -> None:
        own_params = draft_params(params, main.n_ctx)
        (self.device,) = own_params.devices
        with GGUFFile.open(own_params.path) as file:
            try:
                self._runtime = open_runtime(file, own_params, ignore, is_cancelled)
            except OutOfDeviceMemory as error:
                error.hint = paragraph(error.hint, Sentence("Or leave out the draft model."))
                raise
        self._failed: Callable[[str], None] = lambda why: None
        me = weakref.ref(self)  # a cycle would keep weights alive
        self.source: ModelSource[Answer] = ModelSource(
            self._runtime.runner, main.runner.n_vocab, lambda error: _fail(me(), error),
            lambda: _turn(me()),
        )  # fmt: skip
        self.attach(main)

    def attach(self, main: ThreadRuntime) -> None:
        """Count this model's memory for the main model's ranks, and report failures there."""
        self._main = main
        held = [rank.held for rank in self._runtime.ranks]
        main.note_beside("draft", sum(use.weights + use.kv for use in held))
        fallbacks, device = main.fallbacks, self.device
        self._failed = lambda why: fallbacks.report("draft", (device,), why)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the small model compute while the main model's threads rest, instead of spinning."""
        self._main.rest()
        try:
            yield
        finally:
            self._runtime.rest()

    def fail(self, error: Exception) -> None:
        """Free the model after a failure, and report the failure once."""
        log.warning("The draft model has failed: %s", error, exc_info=error)
        is_bug = not isinstance(error, EngineError)
        self._failed(Sentence("a bug in Tandem (see the log)") if is_bug else str(error))
        self._runtime.close()

    def close(self) -> None:
        """Free all memory, raising nothing; safe to call twice."""
        self._runtime.close()


def _fail(draft: DraftModel[Answer] | None, error: Exception) -> None:
    if draft is not None:
        draft.fail(error)


def _turn(draft: DraftModel[Answer] | None) -> AbstractContextManager[None]:
    return nullcontext() if draft is None else draft.turn()
