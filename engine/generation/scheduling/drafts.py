"""Guesses of answers that run, and which of them a pass checks.

A guess is a further single token of its sequence, so that recorded passes serve. Recurrent states
cannot be cut, so the state behind each guess has a place of its own, and an answer goes on from
that behind the last right one (`Piece.source`, `Places.follow`). On GPUs a pass that checks guesses
has no more rows than keep the bits that they have alone (`ModelRunner.most_checked_rows`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from engine.decoding.drafting.control import LENGTHS, DraftControl, Proposal
from engine.decoding.drafting.ngram import Guess, GuessSource, Kind, NgramSource
from engine.generation.kv_cache import OutOfPages
from engine.generation.work import Follow
from engine.vision.images.placed import n_before_picture, text_ids

if TYPE_CHECKING:
    from engine.generation.scheduling.requests import Request
    from engine.runtime.model_runner import ModelRunner

Texts: TypeAlias = "Mapping[Request, Sequence[int]]"
"""All tokens so far of some answers, prompts included."""

MOST_ROWS = 1 + LENGTHS[-1]
"""Largest number of rows of a pass that checks guesses."""


class Drafts:
    """The guesses for the answers of one runtime.

    Args:
        most: largest number of guesses that a pass checks for an answer; 0 for none.
        sources: what makes guesses; None for the texts themselves. Of those that take no time, the
            first that has a guess is asked; one that takes time guesses for the answers for which
            these have none, or none that is as likely to be right.
        control: chooses how many guesses a pass checks.

    Attributes:
        made_s: seconds that sources that take time have taken so far.
    """

    def __init__(
        self,
        most: int = 0,
        sources: Sequence[GuessSource[Request]] | None = None,
        control: DraftControl | None = None,
    ) -> None:
        self._most = most
        self._sources = [NgramSource()] if sources is None else sources
        self.control = control or DraftControl()
        self._checked: dict[Request, Guess] = {}
        self._n_checked = 0
        self.made_s = 0.0
        self._n_left_out = 0

    def guesses(
        self, runtime: ModelRunner, requests: Sequence[Request], most: int = MOST_ROWS
    ) -> Mapping[Request, Sequence[int]]:
        """Return the tokens that a pass is to check behind the next one of each answer.

        There are pages for them. All answers have equally many, as a pass is recorded by its number
        of rows; empty where none are worth it.

        Args:
            most: largest number of guesses for each answer that the cache can take back.
        """
        n_rows = min(runtime.most_checked_rows, runtime.n_batch) // max(1, len(requests))
        room = min(self._most, most, n_rows - 1)
        if room < 1:
            return {}
        most = min((min(room, _room(request, runtime.n_ctx)) for request in requests), default=0)
        if most < 1 or self._is_left_out():
            return {}
        begun, made_s = time.perf_counter(), self.made_s
        self._checked = self._chosen({request: request.wanted for request in requests}, most)
        if not self._checked:
            spent = time.perf_counter() - begun - (self.made_s - made_s)
            self._n_left_out = self.control.n_between_choices(len(requests), spent)
        self._n_checked = len(self._checked)
        n = min(map(len, (guess.tokens for guess in self._checked.values())), default=0)
        if not n or not all(_has_pages(request, 1 + n) for request in requests):
            return {}
        return {request: guess.tokens for request, guess in self._checked.items()}

    def _is_left_out(self) -> bool:
        """Return whether a pass is not worth a choice, as the last one was for nothing."""
        self._n_left_out -= self._n_left_out > 0
        return self._n_left_out > 0

    def _chosen(self, texts: Texts, most: int) -> dict[Request, Guess]:
        """Return equally many guesses for all answers, or none.

        Models that guess cannot see: they read texts without their pictures.
        """
        at_hand = self._at_hand(texts, most)
        makers = {source.kind.source: source for source in self._sources if source.kind}
        read = _without_pictures(texts) if makers else texts
        proposals = [self._propose(texts, at_hand, most)]
        proposals += [self._propose(read, at_hand, most, maker) for maker in makers.values()]
        while chosen := self.control.choose(proposals):
            proposal, length = chosen
            found = at_hand
            if proposal.maker:
                found = {**at_hand, **self._made(makers[proposal.maker], read, at_hand, length)}
            if len(found) == len(texts):
                n_all = min(len(guess.tokens) for guess in found.values())
                n = max(n for n in proposal.lengths if n <= min(n_all, length))
                return {answer: Guess(g.tokens[:n], g.kind) for answer, g in found.items()}
            proposals.remove(proposal)  # such as while a model reads the prompts
        return {}

    def _propose(
        self, texts: Texts, at_hand: Mapping[Request, Guess], most: int,
        maker: GuessSource[Request] | None = None,
    ) -> Proposal:  # fmt: skip
        """Return what could be checked.

        Args:
            at_hand: guesses that are there.
            maker: source that would make guesses in place of what is less sure.
        """
        made = maker.kind if maker else None
        needy = self._needy(texts, at_hand, made) if made else {}
        there = {answer: guess for answer, guess in at_hand.items() if answer not in needy}
        kinds = [guess.kind for guess in there.values()]
        if maker is None or made is None or not needy:
            whole = made is None and len(there) == len(texts)
            return Proposal(kinds, min((len(g.tokens) for g in there.values()), default=0) * whole)
        n = min([most, *(len(guess.tokens) for guess in there.values())])
        kinds += [made] * len(needy)
        return Proposal(kinds, n, made.source, len(needy), maker.n_unread(needy), maker.most)

    def _needy(self, texts: Texts, at_hand: Mapping[Request, Guess], made: Kind) -> Texts:
        """Return the texts for which guesses of a kind are more likely right than those there."""
        share = self.control.share
        return {
            answer: ids
            for answer, ids in texts.items()
            if answer not in at_hand or share(at_hand[answer].kind) < share(made)
        }

    def _made(
        self,
        source: GuessSource[Request],
        texts: Texts,
        at_hand: Mapping[Request, Guess],
        length: int,
    ) -> Mapping[Request, Guess]:
        """Have a source make guesses for the answers that need them, and note how long it takes."""
        assert source.kind is not None
        name, needy = source.kind.source, self._needy(texts, at_hand, source.kind)
        n_unread, begun = source.n_unread(needy), time.perf_counter()
        found = source.guess(needy, length)
        seconds = time.perf_counter() - begun
        self.made_s += seconds
        if len(found) == len(needy):
            self.control.note_making(name, len(needy), length, seconds)
        elif (n_read := n_unread - source.n_unread(needy)) > 0:
            self.control.note_reading(name, n_read, seconds)
        return found

    def _at_hand(self, texts: Texts, most: int) -> dict[Request, Guess]:
        """Return the guesses that take no time to make."""
        found: dict[Request, Guess] = {}
        for source in self._sources:
            if source.kind is None:
                left = {answer: ids for answer, ids in texts.items() if answer not in found}
                found.update(source.guess(left, most))
        return {answer: text for answer, guess in found.items() if (text := _of_text(guess)).tokens}

    def note_seconds(self, requests: Sequence[Request], seconds: float) -> None:
        """Note how long a pass took that checks guesses for answers, and with making them.

        It is compared with passes without guesses, once one was measured.
        """
        alone = self.control.measured_s(len(requests))
        for request in requests:
            request.saved_by_one_s = alone or 0.0
            request.saved_s -= 0.0 if alone is None else seconds - alone

    def note(self, request: Request, n_guessed: int, n_right: int) -> None:
        """Note how many of the guesses for an answer were right, the first ones."""
        kind = self._checked.pop(request).kind
        self.control.note_check(kind, n_guessed, n_right, self._n_checked)

    def forget(self, request: Request) -> None:
        """Free what is kept for an answer that is over."""
        for source in self._sources:
            source.forget(request)


def _without_pictures(texts: Texts) -> Texts:
    return {answer: text_ids(ids) if answer.pictures else ids for answer, ids in texts.items()}


def _of_text(guess: Guess) -> Guess:
    """Return the guess before the first token of a picture, which no answer has."""
    n = n_before_picture(guess.tokens)
    return guess if n == len(guess.tokens) else guess._replace(tokens=guess.tokens[:n])


def _room(request: Request, n_ctx: int) -> int:
    """Return how many guesses an answer has a use for."""
    work, place = request.work, request.place
    if not isinstance(work, Follow) or work.is_timed or place is None:
        return 0
    return min(work.n_left - 1, n_ctx - place.n - 1)


def _has_pages(request: Request, n: int) -> bool:
    """Make sure that there are pages for n more tokens, if nobody has to give way."""
    assert request.place is not None
    try:
        request.place.sequence.reserve(n)
    except OutOfPages:
        return False
    return True
