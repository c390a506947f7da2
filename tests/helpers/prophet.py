"""Drafts of tokens that are known to come, or known to be wrong."""

from collections.abc import Callable, Mapping, Sequence

from engine.decoding.drafting.control import DraftControl, Proposal
from engine.decoding.drafting.ngram import DraftTokens, Kind
from engine.generation.sequence import TokenSequence

N_VOCAB = 40
"""Number of tokens of all vocabularies of the tests, at least."""


class Prophet:
    """Source of drafts that knows whole sequences.

    Args:
        sequences: the sequences, each with its prompt.
        wrong_at: returns the place of the wrong draft of one pass, None for none; its argument is
            the number of drafts made before for the same answer.
    """

    kind, most = None, 0

    def __init__(
        self, sequences: Sequence[Sequence[int]], wrong_at: Callable[[int], int | None]
    ) -> None:
        self._sequences = [list(ids) for ids in sequences]
        self._wrong_at = wrong_at
        self._n: dict[TokenSequence, int] = {}

    def draft(
        self, texts: Mapping[TokenSequence, Sequence[int]], most: int
    ) -> Mapping[TokenSequence, DraftTokens]:
        return {
            answer: DraftTokens(self._of_one(answer, ids, most), Kind("prophet"))
            for answer, ids in texts.items()
        }

    def n_unread(self, texts: Mapping[TokenSequence, Sequence[int]]) -> int:
        return 0

    def forget(self, answer: TokenSequence) -> None:
        self._n.pop(answer, None)

    def _of_one(self, answer: TokenSequence, ids: Sequence[int], most: int) -> list[int]:
        n = len(ids)
        known = next((x for x in self._sequences if x[:n] == list(ids)), [])
        found = known[n : n + most] + [0] * (n + most - max(n, len(known)))
        found = found[:most]
        n_before = self._n.get(answer, 0)
        wrong, self._n[answer] = self._wrong_at(n_before), n_before + 1
        if wrong is not None and wrong < len(found):
            found[wrong] = (found[wrong] + 1) % N_VOCAB
        return found


class _Always(DraftControl):
    def choose(self, proposals: Sequence[Proposal]) -> tuple[Proposal, int] | None:
        found = [(proposal, max(proposal.lengths)) for proposal in proposals if proposal.lengths]
        return max(found, key=lambda choice: choice[1], default=None)


def always() -> DraftControl:
    """Return a control that has as many drafts checked as there are."""
    return _Always()
