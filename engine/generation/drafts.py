"""Draft tokens for running sequences (speculative decoding), and which of them a pass verifies.

Each draft token is a separate row, as in recorded single-token passes. Recurrent states
cannot be cut, so the state after each draft has its own slot, and a sequence continues from the
state after the last accepted draft (`Piece.source`, `KVCacheManager.accept_draft`). On GPUs, a pass
that verifies drafts is limited to the number of rows that compute the same bits as single rows
(`ModelRunner.max_verify_rows`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from engine.decoding.drafting.control import LENGTHS, DraftControl, Proposal
from engine.decoding.drafting.ngram import DraftSource, DraftTokens, Kind, NgramSource
from engine.generation.kv_cache import OutOfPages
from engine.generation.sequence import Decode
from engine.model.forward.batch import MAX_AT_ONCE, Batch, Piece
from engine.vision.images.placed import n_before_image, text_ids

if TYPE_CHECKING:
    from engine.generation.sequence import TokenSequence
    from engine.load_params import LoadParams
    from engine.runtime.model_runner import ModelRunner

Texts: TypeAlias = "Mapping[TokenSequence, Sequence[int]]"
"""All tokens so far for some answers, including prompts."""

MAX_ROWS = 1 + LENGTHS[-1]
"""Maximum number of rows in a pass that verifies drafts."""


class Drafts:
    """The drafts for one runtime's answers.

    Args:
        most: maximum number of drafts per answer that a pass verifies; 0 for none.
        sources: drafters; None for n-grams from the texts. The first instant source with a draft is
            used; slower ones draft for answers with no such drafts, or with less likely ones.
        control: chooses how many drafts a pass verifies.

    Attributes:
        made_s: total seconds spent in sources that are not instant.
    """

    def __init__(
        self,
        most: int = 0,
        sources: Sequence[DraftSource[TokenSequence]] | None = None,
        control: DraftControl | None = None,
    ) -> None:
        self._most = most
        self._sources = [NgramSource()] if sources is None else sources
        self.control = control or DraftControl()
        self._checked: dict[TokenSequence, DraftTokens] = {}
        self._n_checked = 0
        self.made_s = 0.0
        self._n_left_out = 0

    def draft_tokens(
        self, runtime: ModelRunner, sequences: Sequence[TokenSequence], most: int = MAX_ROWS
    ) -> Mapping[TokenSequence, Sequence[int]]:
        """Return the tokens to verify in a pass after each answer's next one.

        Their pages are reserved. All answers have the same number, as passes are recorded by
        number of rows; there are none if verifying is not worthwhile.

        Args:
            most: maximum number of drafts per answer that the cache can roll back.
        """
        n_rows = min(runtime.max_verify_rows, runtime.n_batch) // max(1, len(sequences))
        room = min(self._most, most, n_rows - 1)
        if room < 1:
            return {}
        most = min((min(room, _room(sequence, runtime.n_ctx)) for sequence in sequences), default=0)
        if most < 1 or self._is_left_out():
            return {}
        begun, made_s = time.perf_counter(), self.made_s
        self._checked = self._chosen({sequence: sequence.tokens for sequence in sequences}, most)
        if not self._checked:
            spent = time.perf_counter() - begun - (self.made_s - made_s)
            self._n_left_out = self.control.n_between_choices(len(sequences), spent)
        self._n_checked = len(self._checked)
        n = min(map(len, (draft.tokens for draft in self._checked.values())), default=0)
        if not n or not all(_has_pages(sequence, 1 + n) for sequence in sequences):
            return {}
        return {sequence: draft.tokens for sequence, draft in self._checked.items()}

    def _is_left_out(self) -> bool:
        self._n_left_out -= self._n_left_out > 0
        return self._n_left_out > 0

    def _chosen(self, texts: Texts, most: int) -> dict[TokenSequence, DraftTokens]:
        """Return equally many drafts per answer, or none; models read texts without images."""
        at_hand = self._at_hand(texts, most)
        makers = {source.kind.source: source for source in self._sources if source.kind}
        read = _without_images(texts) if makers else texts
        proposals = [self._propose(texts, at_hand, most)]
        proposals += [self._propose(read, at_hand, most, maker) for maker in makers.values()]
        while chosen := self.control.choose(proposals):
            proposal, length = chosen
            found = at_hand
            if proposal.maker:
                found = {**at_hand, **self._made(makers[proposal.maker], read, at_hand, length)}
            if len(found) == len(texts):
                n_all = min(len(draft.tokens) for draft in found.values())
                n = max(n for n in proposal.lengths if n <= min(n_all, length))
                return {answer: DraftTokens(g.tokens[:n], g.kind) for answer, g in found.items()}
            proposals.remove(proposal)  # for example while a model reads the prompts
        return {}

    def _propose(
        self, texts: Texts, at_hand: Mapping[TokenSequence, DraftTokens], most: int,
        maker: DraftSource[TokenSequence] | None = None,
    ) -> Proposal:  # fmt: skip
        """Propose the available drafts, with the less likely ones replaced by those of `maker`."""
        made = maker.kind if maker else None
        needy = self._needy(texts, at_hand, made) if made else {}
        there = {answer: draft for answer, draft in at_hand.items() if answer not in needy}
        kinds = [draft.kind for draft in there.values()]
        if maker is None or made is None or not needy:
            whole = made is None and len(there) == len(texts)
            return Proposal(kinds, min((len(g.tokens) for g in there.values()), default=0) * whole)
        n = min([most, *(len(draft.tokens) for draft in there.values())])
        kinds += [made] * len(needy)
        return Proposal(kinds, n, made.source, len(needy), maker.n_unread(needy), maker.most)

    def _needy(
        self, texts: Texts, at_hand: Mapping[TokenSequence, DraftTokens], made: Kind
    ) -> Texts:
        share = self.control.share
        return {
            answer: ids
            for answer, ids in texts.items()
            if answer not in at_hand or share(at_hand[answer].kind) < share(made)
        }

    def _made(
        self, source: DraftSource[TokenSequence], texts: Texts,
        at_hand: Mapping[TokenSequence, DraftTokens], length: int,
    ) -> Mapping[TokenSequence, DraftTokens]:  # fmt: skip
        assert source.kind is not None
        name, needy = source.kind.source, self._needy(texts, at_hand, source.kind)
        n_unread, begun = source.n_unread(needy), time.perf_counter()
        found = source.draft(needy, length)
        seconds = time.perf_counter() - begun
        self.made_s += seconds
        if len(found) == len(needy):
            self.control.note_making(name, len(needy), length, seconds)
        elif (n_read := n_unread - source.n_unread(needy)) > 0:
            self.control.note_reading(name, n_read, seconds)
        return found

    def _at_hand(self, texts: Texts, most: int) -> dict[TokenSequence, DraftTokens]:
        found: dict[TokenSequence, DraftTokens] = {}
        for source in self._sources:
            if source.kind is None:
                left = {answer: ids for answer, ids in texts.items() if answer not in found}
                found.update(source.draft(left, most))
        return {answer: text for answer, draft in found.items() if (text := _of_text(draft)).tokens}

    def note_seconds(self, sequences: Sequence[TokenSequence], seconds: float) -> None:
        """Note the duration of a pass that verifies drafts, including the drafting.

        It is compared with passes without drafts, once one has been measured.
        """
        alone = self.control.measured_s(len(sequences))
        for sequence in sequences:
            sequence.saved_by_one_s = alone or 0.0
            sequence.saved_s -= 0.0 if alone is None else seconds - alone

    def note(self, sequence: TokenSequence, n_drafted: int, n_right: int) -> None:
        """Note how many of an answer's drafts were accepted."""
        kind = self._checked.pop(sequence).kind
        self.control.note_check(kind, n_drafted, n_right, self._n_checked)

    def forget(self, sequence: TokenSequence) -> None:
        """Free the state of a finished answer."""
        for source in self._sources:
            source.forget(sequence)


def _without_images(texts: Texts) -> Texts:
    return {answer: text_ids(ids) if answer.images else ids for answer, ids in texts.items()}


def _of_text(draft: DraftTokens) -> DraftTokens:
    """Return the draft up to its first image token, as answers have none."""
    n = n_before_image(draft.tokens)
    return draft if n == len(draft.tokens) else draft._replace(tokens=draft.tokens[:n])


def _room(sequence: TokenSequence, n_ctx: int) -> int:
    step, cache = sequence.step, sequence.cache
    if not isinstance(step, Decode) or step.is_timed or cache is None:
        return 0
    return min(step.n_left - 1, n_ctx - cache.n - 1)


def _has_pages(sequence: TokenSequence, n: int) -> bool:
    """Reserve pages for n more tokens; return False if that would need preemption."""
    assert sequence.cache is not None
    try:
        sequence.cache.sequence.reserve(n)
    except OutOfPages:
        return False
    return True


MTP = Kind("mtp", first_share=0.7)
"""Kind of drafts by MTP blocks."""


N_HELD = 32
"""Number of tokens after a draft for which a device does not sample ahead, because drafting needs
an idle device and more drafts usually follow."""


class MTPSource:
    """Drafts for all running answers by the model's own MTP blocks.

    They continue from the hidden state of an answer's last token, so all tokens except the next one
    must be computed. If a device is sampling ahead, it stops first, and drafting follows once its
    tokens are read.

    Args:
        runtime: the model.
        tokens: token for each row of the block's head, if these differ from the model's.
    """

    kind = MTP

    def __init__(self, runtime: ModelRunner, tokens: Sequence[int] = ()) -> None:
        self._runtime, self._tokens = runtime, tokens

    @property
    def can_draft(self) -> bool:
        """Whether the model has an MTP block."""
        return self._runtime.drafter is not None

    @property
    def most(self) -> int:
        """Maximum number of drafts per text: the number of blocks, or 0 for no limit."""
        drafter = self._runtime.drafter
        return 0 if drafter is None else drafter.max_drafts

    def move(self, runtime: ModelRunner) -> None:
        """Continue on another runtime."""
        self._runtime = runtime

    def draft(self, texts: Texts, most: int) -> Mapping[TokenSequence, DraftTokens]:
        """Return up to `most` tokens that may follow each text; see `DraftSource`."""
        drafter, source = self._runtime.drafter, self._runtime.token_source
        if drafter is None or (source is not None and not source.hold(N_HELD)):
            return {}
        most = min(most, self.most or most)
        sequences = [sequence for sequence in texts if _is_ready(sequence, most)]
        if not sequences or len(sequences) > MAX_AT_ONCE:
            return {}
        found = [[sequence.tokens[-1]] for sequence in sequences]
        for n in range(most):
            batch = Batch(tuple(_piece(sequence, n) for sequence in sequences), 0)
            logits = drafter.draft([tokens[-1] for tokens in found], batch, n)
            for tokens, row in zip(found, logits.argmax(-1).tolist(), strict=True):
                tokens.append(self._tokens[row] if self._tokens else row)
        return {
            sequence: DraftTokens(tokens[1:], MTP)
            for sequence, tokens in zip(sequences, found, strict=True)
        }

    def n_unread(self, texts: Texts) -> int:
        """Return 0, as the few unread tokens are read along with a draft."""
        return 0

    def forget(self, answer: TokenSequence) -> None:
        """Do nothing, as the state belongs to the batch index."""


def draft_sources(params: LoadParams, mtp: MTPSource) -> list[DraftSource[TokenSequence]]:
    """Return the drafters, except a draft model, for a model loaded with `params`."""
    sources: list[DraftSource[TokenSequence]] = []
    if params.draft not in ("off", "mtp"):
        sources.append(NgramSource())
    if mtp.can_draft:
        sources.append(mtp)
    return sources


def draft_variants(
    params: LoadParams, mtp: MTPSource, draft_model: DraftSource[TokenSequence] | None
) -> dict[str, Drafts]:
    """Return drafts of each kind for a model loaded with `params`, to compare them.

    Returns:
        Drafts by kind: first "off" (no drafts), then "ngram", "mtp" and "model" if available.
    """
    found = {"off": Drafts()}
    if not params.n_draft:
        return found
    found["ngram"] = Drafts(params.n_draft, [NgramSource()])
    if mtp.can_draft:
        found["mtp"] = Drafts(params.n_draft, [NgramSource(), mtp])
    if draft_model is not None:
        found["model"] = Drafts(params.n_draft, [NgramSource(), draft_model])
    return found


def _is_ready(sequence: TokenSequence, n: int) -> bool:
    """Return whether all tokens except the next one are computed; reserve pages for n more."""
    if sequence.cache is None or sequence.n_missing != 1 or not sequence.cache.n:
        return False
    return _has_pages(sequence, n)


def _piece(sequence: TokenSequence, n: int) -> Piece:
    cache = sequence.cache
    assert cache is not None, "it is ready"
    return cache.piece(1, skip=n, shift=sequence.images.shift(cache.n))
