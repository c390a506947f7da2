"""What the hub and the keyring are asked, each on a thread of its own; the newest answer counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from app.core.background import LatestJob
from app.core.translation import tr
from app.models.downloads.hub.address import Address, is_offline
from app.models.downloads.hub.client import OFFLINE, Hub, Repository
from app.models.downloads.hub.offers import ModelOffer, offers, wanted
from app.models.downloads.hub.tokens import TokenStore
from app.models.downloads.outlook import direct_name, look_at
from app.models.downloads.transfer.remote_file import RemoteFile
from app.models.downloads.transfer.source import Source, TryLater
from app.models.library.entries import LibraryEntry, Situation
from engine import EngineError

LEAVE_S = 1.0
"""Longest wait in seconds for a question when the window closes; its thread ends by itself."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What can be downloaded from one place.

    Attributes:
        first: number of the offer that was asked for; 0 for none.
    """

    repository: Repository
    offers: tuple[ModelOffer, ...]
    first: int = 0


@dataclass(frozen=True, slots=True)
class OfferVerdict:
    """What the header of an offer tells."""

    offer: ModelOffer
    entry: LibraryEntry


class HubQuestions(QObject):
    """Questions to one hub; each answer comes as a signal."""

    found = Signal(object)  # list of FoundRepo
    opened = Signal(object)  # Choices
    looked = Signal(object)  # OfferVerdict
    kept = Signal(object)  # bool: whether the keyring has the token that was entered
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
        """Ask for repositories."""
        self._looking.drop()
        self._asking.run(lambda: self._hub.search(words))

    def open(self, address: Address) -> None:
        """Ask what a place has."""
        self._looking.drop()
        self._asking.run(lambda: self._choices(address))

    def look(self, offer: ModelOffer, situation: Situation) -> None:
        """Ask for the header of an offer, and plan with it."""
        self._looking.run(lambda: self._look(offer, situation))

    def keep_token(self, token: str) -> None:
        """Use another token; "" for none."""
        self._keeping.run(lambda: self._tokens.put(token))

    def close(self) -> None:
        """Wait for no answer any more."""
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
        first = wanted(found, address.quant, address.path)
        if first is None and (address.quant or address.path):
            name = address.quant or address.path
            raise EngineError(
                tr("{repository} has no {name}.").format(repository=repository.repo, name=name),
                tr("It has {names}.").format(names=", ".join(one.quant for one in found[:12])),
            )
        return Choices(repository, tuple(found), found.index(first) if first else 0)

    def _direct(self, url: str) -> Choices:
        """Return the one model behind a link."""
        if is_offline():
            raise EngineError(tr(OFFLINE), tr("Unset it and start Tandem again."))
        source = self._open_source()
        try:
            n_bytes, mark = source.size_of(url)
        except TryLater as failure:
            raise EngineError(str(failure), tr("Try it again.")) from None
        finally:
            source.close()
        host = url.partition("//")[2].partition("/")[0].partition(":")[0]
        file = RemoteFile(url, direct_name(url), n_bytes, "", host, mark)
        repository = Repository(host, mark, "", 0, False, (file,), "")
        return Choices(repository, tuple(offers([file])))

    def _look(self, offer: ModelOffer, situation: Situation) -> OfferVerdict:
        if is_offline():
            raise EngineError(tr(OFFLINE), tr("Unset it and start Tandem again."))
        source = self._open_source()
        try:
            return OfferVerdict(offer, look_at(offer, source, situation, self._is_closed.is_set))
        finally:
            source.close()


def numbered(found: Sequence[ModelOffer], offer: ModelOffer) -> int | None:
    """Return the number of an offer in a list; None if it is of another one."""
    return found.index(offer) if offer in found else None
