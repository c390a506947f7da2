"""Texts of a request, or the ids of their tokens, of which there may be one or several."""

from __future__ import annotations

from app.server.refusal import bad_value

TextInput = str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
"""A text, several, the ids of a text's tokens, or those of several texts."""

TextOrIds = str | tuple[int, ...]
"""A text, or the ids of its tokens."""

MOST_IDS = 1 << 20
"""Largest number of tokens of a text."""


def separate_inputs(given: TextInput, field: str, n_vocab: int) -> tuple[TextOrIds, ...]:
    """Return the texts of a request one by one, each as it is or as its tokens.

    Args:
        field: name of the field that they stand in.
        n_vocab: number of tokens of the model.

    Raises:
        Refusal: one has no tokens, too many, or one that the model lacks.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        ids = tuple(one for one in given if isinstance(one, int))
        check_ids(ids, field, n_vocab)
        return (ids,)
    found: list[TextOrIds] = []
    for at, one in enumerate(given):
        assert isinstance(one, str | tuple), "the request was checked"
        if isinstance(one, tuple):
            check_ids(one, f"{field}[{at}]", n_vocab)
        found.append(one)
    return tuple(found)


def check_ids(ids: tuple[int, ...], place: str, n_vocab: int) -> None:
    """Check that there are tokens, and that the model has them all.

    Raises:
        Refusal: it is not so.
    """
    if not 0 < len(ids) <= MOST_IDS:
        text = f"{place} must have 1 to {MOST_IDS} tokens, not {len(ids)}."
        raise bad_value(place, text)
    if min(ids) >= 0 and max(ids) < n_vocab:
        return
    for at, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            wrong = f"{place}[{at}]"
            raise bad_value(wrong, f"{wrong} must be from 0 to {n_vocab - 1}, not {token}.")
