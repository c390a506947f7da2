"""Requests to the hub and the keyring on threads; a newer request replaces an older one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from PySide6.QtCore import QObject, Signal

import engine
from app.core.background import LatestJob
from app.core.translation import tr
from app.core.units import TransferProgress, amount_text, decimal_size, moving_text
from app.models.downloads.download_session import DownloadJob
from app.models.downloads.hub.client import (
    FoundRepo,
    Hub,
    Repository,
    TokenStore,
    check_online,
    fetch_header,
)
from app.models.downloads.hub.offers import Address, ModelOffer, find_offer, offers
from app.models.downloads.transfer.source import RemoteFile, Source, TryLater
from app.models.library.library_session import LibraryEntry, Situation, prospect_of, read_entry
from app.models.library.library_view import LibraryCell, count_text, outlook
from app.models.library.scan import FoundModel
from engine import EngineError

ROOM_FOR_REST = 1.1  # memory needed with a short context, relative to the weights


def look_at(
    offer: ModelOffer,
    source: Source,
    situation: Situation,
    is_stopped: Callable[[], bool] = lambda: False,
) -> LibraryEntry:
    """Fetch an offer's header and predict how the model would run.

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
    """Return the verdict for an offer whose header was fetched."""
    cell = outlook(entry)
    tip = tr("{what}. Planned from the model's header.").format(what=cell.tip.rstrip("."))
    return replace(cell, tip=tip)


def estimate(offer: ModelOffer, free_bytes: dict[str, int]) -> LibraryCell:
    """Return a verdict based only on the size: whether about that much memory is free."""
    n_weights = sum(part.n_bytes for part in offer.parts)
    free = sum(free_bytes.values())
    if not free:
        return LibraryCell("–", -1.0, tr("The devices are not known yet."))
    fits = ROOM_FOR_REST * n_weights <= free
    tip = tr("Estimated from its size; {free} of memory is free. “Check fit” reads its header.")
    return LibraryCell(
        tr("probably fits") if fits else tr("probably too large"),
        float(fits),
        tip.format(free=decimal_size(free)),
    )


def direct_name(url: str) -> str:
    """Return the file name at the end of a link."""
    return unquote(urlsplit(url).path).rpartition("/")[2]


LEAVE_S = 1.0  # maximum wait for a request when the window closes, in seconds


@dataclass(frozen=True, slots=True)
class Choices:
    """A repository's offers; `first` is the index of the requested offer, or 0."""

    repository: Repository
    offers: tuple[ModelOffer, ...]
    first: int = 0


@dataclass(frozen=True, slots=True)
class OfferVerdict:
    offer: ModelOffer
    entry: LibraryEntry


class HubQuestions(QObject):
    """Requests to one hub; results are signals."""

    found = Signal(object)  # list of FoundRepo
    opened = Signal(object)  # Choices
    looked = Signal(object)  # OfferVerdict
    kept = Signal(object)  # bool: whether the token is in the keyring
    failed = Signal(object)  # EngineError

    def __init__(
        self,
        hub: Hub,
        tokens: TokenStore,
        open_source: Callable[[], Source],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._hub, self._tokens, self._open_source = hub, tokens, open_source
        self._is_closed = threading.Event()
        self._asking, self._looking, self._keeping = (
            LatestJob(f"tandem-{name}", self) for name in ("hub", "header", "keyring")
        )
        self._asking.done.connect(self._on_answer)
        self._looking.done.connect(self.looked)
        self._keeping.done.connect(self.kept)
        for job in (self._asking, self._looking):
            job.failed.connect(self.failed)

    def search(self, words: str) -> None:
        """Search for repositories."""
        self._looking.drop()
        self._asking.run(lambda: self._hub.search(words))

    def open(self, address: Address) -> None:
        """List the offers at an address."""
        self._looking.drop()
        self._asking.run(lambda: self._choices(address))

    def look(self, offer: ModelOffer, situation: Situation) -> None:
        """Fetch an offer's header and plan with it."""
        self._looking.run(lambda: self._look(offer, situation))

    def keep_token(self, token: str) -> None:
        """Store a new token; "" removes the stored one."""
        self._keeping.run(lambda: self._tokens.put(token))

    def close(self) -> None:
        """Cancel all requests."""
        self._is_closed.set()
        for job in (self._asking, self._looking, self._keeping):
            job.close(LEAVE_S)

    def _on_answer(self, answer: object) -> None:
        (self.opened if isinstance(answer, Choices) else self.found).emit(answer)

    # on threads

    def _choices(self, address: Address) -> Choices:
        if address.url:
            return self._direct(address.url)
        repository = self._hub.repository(address.repo, address.revision)
        found = offers(repository.files)
        if not found:
            raise EngineError(
                tr("{repository} has no GGUF model.").format(repository=repository.repo),
                tr("Look for one with “GGUF” in its name."),
            )
        first = find_offer(found, address.quant, address.path)
        if first is None and (address.quant or address.path):
            name = address.quant or address.path
            raise EngineError(
                tr("{repository} has no {name}.").format(repository=repository.repo, name=name),
                tr("It has {names}.").format(names=", ".join(one.quant for one in found[:12])),
            )
        return Choices(repository, tuple(found), found.index(first) if first else 0)

    def _direct(self, url: str) -> Choices:
        check_online()
        source = self._open_source()
        try:
            n_bytes, mark = source.size_of(url)
        except TryLater as failure:
            raise EngineError(str(failure), tr("Try again.")) from None
        finally:
            source.close()
        host = url.partition("//")[2].partition("/")[0].partition(":")[0]
        file = RemoteFile(url, direct_name(url), n_bytes, "", host, mark)
        repository = Repository(host, mark, "", 0, False, (file,), "")
        return Choices(repository, tuple(offers([file])))

    def _look(self, offer: ModelOffer, situation: Situation) -> OfferVerdict:
        check_online()
        source = self._open_source()
        try:
            return OfferVerdict(offer, look_at(offer, source, situation, self._is_closed.is_set))
        finally:
            source.close()


def result_headers() -> tuple[str, ...]:
    return (
        tr("Repository"), tr("Publisher"), tr("Parameters"), tr("Downloads"), tr("Likes"),
        tr("Updated"),
    )  # fmt: skip


def result_cells(found: FoundRepo) -> list[LibraryCell]:
    """Return the cells in a repository's row; see `result_headers`."""
    publisher, _, name = found.repo.partition("/")
    updated = found.updated
    lock = tr("{name} · gated").format(name=name) if found.is_gated else name
    return [
        LibraryCell(lock, name.casefold(), found.repo),
        LibraryCell(publisher, publisher.casefold()),
        LibraryCell(count_text(found.n_params) if found.n_params else "–", found.n_params),
        LibraryCell(count_text(found.n_downloads), found.n_downloads, tr("In the last 30 days")),
        LibraryCell(count_text(found.n_likes), found.n_likes),
        LibraryCell(
            f"{updated:%Y-%m-%d}" if updated else "–", updated.timestamp() if updated else 0
        ),
    ]


def repository_facts(found: Repository) -> str:
    """Return facts about a repository in one line."""
    parts = [
        tr("{count} parameters").format(count=count_text(found.n_params)) if found.n_params else "",
        tr("licence: {name}").format(name=found.licence) if found.licence else "",
        tr("gated") if found.is_gated else "",
    ]
    return " · ".join(part for part in parts if part)


def state_text(job: DownloadJob, progress: TransferProgress) -> str:
    """Return a download's state as "1.2 of 4.9 GB · 35 MB/s · 2 min left"."""
    if job.state == "failed":
        return f"{job.problem} {job.hint}".strip()
    if job.state == "done":
        return tr("{size} · done").format(size=decimal_size(job.n_bytes))
    amount = amount_text(progress.n_bytes, job.n_bytes)
    if job.state == "waiting":
        return tr("{amount} · queued").format(amount=amount)
    if job.state == "paused":
        return tr("{amount} · paused").format(amount=amount)
    if progress.is_checking:
        return tr("{amount} · verifying").format(amount=amount)
    return moving_text(progress, job.n_bytes)
