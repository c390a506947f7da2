"""What is known of a model as the texts of its row."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.translation import tr, tr_later
from app.core.units import context_text, decimal, decimal_size, rate_text
from app.devices.split.figures import rank_labels
from app.models.library.scan import FoundModel
from app.models.library.session import LastUse, LibraryEntry, Mark

UNKNOWN = "…"


@dataclass(frozen=True, slots=True)
class LibraryCell:
    """A text of a row, and what it is sorted by.

    Attributes:
        order: a number, or the text in small letters.
        tip: more on it, or "".
        spoken: the text for screen readers where it has signs; "" if it has none.
    """

    text: str
    order: float | str
    tip: str = ""
    spoken: str = ""


def cells(entry: LibraryEntry, last: LastUse, *, is_pinned: bool, mark: Mark) -> list[LibraryCell]:
    """Return the cells of a model's row, in the order of `HEADERS`."""
    found, info = entry.found, entry.info
    unread = "" if entry.problem else UNKNOWN
    return [
        _name_cell(found, is_pinned=is_pinned, mark=mark),
        outlook(entry),
        _last_cell(last),
        LibraryCell(decimal_size(found.n_bytes), found.n_bytes),
        LibraryCell(info.quant if info else unread, info.quant if info else ""),
        LibraryCell(
            f"{count_text(info.n_params)} {info.architecture}" if info else unread,
            info.n_params if info else 0,
            tr("Number of parameters, and the architecture"),
        ),
        LibraryCell(
            context_text(info.n_ctx_train) if info and info.n_ctx_train else unread,
            info.n_ctx_train if info else 0,
        ),
        LibraryCell(tr(found.program), found.program.casefold(), str(found.path.parent)),
    ]


HEADERS = (
    tr_later("Model"),
    tr_later("On these devices"),
    tr_later("Last time"),
    tr_later("Size"),
    tr_later("Type"),
    tr_later("Parameters"),
    tr_later("Context"),
    tr_later("From"),
)


def _name_cell(found: FoundModel, *, is_pinned: bool, mark: Mark) -> LibraryCell:
    """Return a model's name with what is special about it, such as "● Qwen · loaded"."""
    helpers = [path.name for path in (found.projector, found.draft) if path is not None]
    with_helpers = tr("with {files}").format(files=", ".join(helpers))
    signs = "★ " * is_pinned + "● " * (mark == "loaded")
    words = [found.name]
    if found.projector is not None:
        words.append(tr("sees pictures"))
    if mark:
        words.append(tr("loaded") if mark == "loaded" else tr("loading …"))
    return LibraryCell(
        signs + " · ".join(words),
        found.name.casefold(),
        str(found.path) + f"\n{with_helpers}" * bool(helpers),
        ", ".join([*words, *[tr("pinned")] * is_pinned]),
    )


def _last_cell(last: LastUse) -> LibraryCell:
    """Return how a model ran the last time: "58.1 tok/s", and with which split."""
    if not last.tokens_per_s:
        return LibraryCell(tr("opened") if last.plan else "–", 0.5 if last.plan else 0, last.plan)
    rate = f"{rate_text(last.tokens_per_s)} tok/s"
    return LibraryCell(rate, last.tokens_per_s, last.plan)


def outlook(entry: LibraryEntry) -> LibraryCell:
    """Return how a model would run here: "~ 61 tok/s · 32k", or why it does not."""
    if entry.problem:
        return LibraryCell(tr("cannot be opened"), -2.0, entry.problem)
    prospect = entry.prospect
    if prospect is None and entry.is_judged:
        return LibraryCell("–", -1.5, tr("No plan can be made for this file."))
    if prospect is None:
        return LibraryCell(UNKNOWN, -1.0)
    if not prospect.fits:
        return LibraryCell(
            tr("too large"), 0.0, tr("There is too little free memory for this model.")
        )
    where = ", ".join(dict.fromkeys(rank_labels(prospect.devices)))
    context = context_text(prospect.n_ctx if prospect.n_ctx < 4096 else prospect.n_ctx & ~1023)
    is_timed = prospect.tokens_per_s > 0
    tip = (
        tr("On {devices}, with a context of {n} tokens; speed as predicted")
        if is_timed
        else tr("On {devices}, with a context of {n} tokens")
    ).format(devices=where, n=prospect.n_ctx)
    if not is_timed:
        return LibraryCell(tr("fits · {context}").format(context=context), 0.5, tip)
    rate = rate_text(prospect.tokens_per_s)
    return LibraryCell(
        f"~ {rate} tok/s · {context}",
        prospect.tokens_per_s,
        tip,
    )


def count_text(n: int) -> str:
    """Return a number of parameters as "8.0 B", "135 M"."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return decimal(f"{n / size:.1f} {unit}") if n < 100 * size else f"{n / size:.0f} {unit}"
    return str(n)
