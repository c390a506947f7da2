"""How a model would run here, told before it is downloaded: from its header, or from its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from urllib.parse import unquote, urlsplit

import engine
from app.core.translation import tr
from app.core.units import decimal_size
from app.models.downloads.hub.header import fetch_header
from app.models.downloads.hub.offers import ModelOffer
from app.models.downloads.transfer.source import Source
from app.models.library.entries import LibraryEntry, Situation, prospect_of, read_entry
from app.models.library.scan import FoundModel
from app.models.library.texts import LibraryCell, outlook

ROOM_FOR_REST = 1.1
"""Memory that a model takes with a short context, over that of its weights."""


def look_at(
    offer: ModelOffer,
    source: Source,
    situation: Situation,
    is_stopped: Callable[[], bool] = lambda: False,
) -> LibraryEntry:
    """Fetch the header of an offer and predict how it would run.

    Raises:
        EngineError: the header cannot be fetched.
    """
    with engine.temporary_folder(None) as folder:
        path = fetch_header(source, offer.parts, folder, is_stopped)
        entry = read_entry(FoundModel(path, offer.name, "", offer.n_bytes, 0.0, (path,)))
        if entry.info is not None and not entry.problem:
            entry = replace(entry, prospect=prospect_of(entry.info, situation), is_judged=True)
    return entry


def verdict_of(entry: LibraryEntry) -> LibraryCell:
    """Return what the header tells."""
    found = outlook(entry)
    tip = tr("{what}. Planned from the model's header.").format(what=found.tip.rstrip("."))
    return replace(found, tip=tip)


def estimate(offer: ModelOffer, free_bytes: dict[str, int]) -> LibraryCell:
    """Return what the size alone tells: whether there is about as much memory."""
    n_weights = sum(part.n_bytes for part in offer.parts)
    free = sum(free_bytes.values())
    if not free:
        return LibraryCell("–", -1.0, tr("The devices are not known yet."))
    fits = ROOM_FOR_REST * n_weights <= free
    tip = tr("Estimated from its size: {free} of memory are free. “Check fit” asks for more.")
    return LibraryCell(
        tr("probably fits") if fits else tr("probably too large"),
        float(fits),
        tip.format(free=decimal_size(free)),
    )


def direct_name(url: str) -> str:
    """Return the file name that a link ends in."""
    return unquote(urlsplit(url).path).rpartition("/")[2]
