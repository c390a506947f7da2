"""Places in the cache: which answers have one, and which lose it where there is too little room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.generation.kv_cache import OutOfPages
from engine.generation.scheduling.places import CachePlace, Places

if TYPE_CHECKING:
    from engine.generation.scheduling.ahead import Ahead
    from engine.generation.scheduling.requests import Request


class Seats:
    """The answers that are not over, and those of them that have a place in the cache.

    Args:
        places: the cache that the answers share.
        ahead: ends sampling on a device, which only one answer can have.

    Attributes:
        requests: the answers that are not over, in order of arrival.
        last: tokens of the sequence that was computed last, as far as they were cached then.
    """

    def __init__(self, places: Places, ahead: Ahead) -> None:
        self.requests: list[Request] = []
        self.last: Sequence[int] = ()
        self._places, self._ahead = places, ahead
        self._blocked: tuple[Request, int] | None = None
        self._n_freed = 0

    @property
    def active(self) -> list[Request]:
        """The answers that are to be computed further, in order of arrival."""
        return [r for r in self.requests if r.background is None and not r.has_unread]

    @property
    def placed(self) -> list[Request]:
        """The answers that have a place, in order of arrival."""
        return [request for request in self.requests if request.place]

    def open(self, request: Request) -> bool:
        """Give an answer a place; return whether there was room for it."""
        others = [r for r in self.active if r.place]
        if others and self._blocked == (request, self._n_freed):
            return False  # nothing has changed since the last time
        self.stop_ahead()
        while len(self.placed) >= self._places.most:
            if not self.preempt_unread(request):
                return False
        place = self._found_place(request)
        while place and self.placed:
            held = [other.place for other in self.placed if other.place]
            if self._places.has_room(place, len(request.wanted), held):
                break
            if not self.preempt_unread(request):
                self._places.close(place, is_kept=False)
                place = None
        if place is None:
            self._blocked = (request, self._n_freed)
            return False
        request.place = place
        request.note_place()
        return True

    def _found_place(self, request: Request) -> CachePlace | None:
        """Return a place with what is cached of an answer's tokens; None if there is none.

        It does not end within a picture whose tokens see each other.
        """
        wanted = request.wanted[:-1]
        while True:
            try:
                place = self._places.open(wanted)
            except OutOfPages:
                if not self._make_room(request):
                    return None
                continue
            n = request.pictures.whole(place.n)
            if n == place.n:
                return place
            self._places.close(place)
            wanted = wanted[:n]

    def reserve(self, request: Request, n: int) -> bool:
        """Make sure that there are pages for n more tokens; return False if there are none.

        The answer has lost its place then, unless it is the only one that has one.
        """
        while True:
            assert request.place is not None
            try:
                request.place.sequence.reserve(n)
            except OutOfPages:
                if not self._make_room(request):
                    return False
            else:
                return True

    def _make_room(self, request: Request) -> bool:
        """Preempt another answer for one; return False where that one has to wait itself."""
        if self.preempt_unread(request):
            return True
        placed = self.placed
        newer = placed and self.requests.index(placed[-1]) > self.requests.index(request)
        if newer:
            self.release(placed[-1])
        elif request.place and len(placed) > 1:
            self.release(request)
        return bool(newer)

    def preempt_unread(self, request: Request) -> bool:
        """Preempt the newest of the other answers whose events nobody reads, if there is one."""
        found = [r for r in self.placed if r is not request and r.has_unread]
        if found:
            self.release(found[-1])
        return bool(found)

    def stop_ahead(self) -> None:
        """End sampling on a device, so that something else can be computed."""
        request = self._ahead.request
        self._ahead.stop()
        if request is not None and request.is_ahead:
            self.release(request)

    def release(self, request: Request, *, is_kept: bool = True) -> None:
        """Take an answer's place away; what it computed can be found until it is overwritten."""
        self._ahead.stop(request)
        place, request.place = request.place, None
        if place is not None:
            self.last = place.sequence.ids
            self._n_freed += 1
            self._places.close(place, is_kept=is_kept)
        request.is_ahead = False

    def rewind(self, request: Request) -> None:
        """Cut an answer's sequence to what its work goes on from, or have it opened anew."""
        self.stop_ahead()
        place, wanted = request.place, request.wanted[:-1]
        if place and self._places.rewind(place, wanted):
            n = request.pictures.whole(place.n)
            if n == place.n or self._places.rewind(place, wanted[:n]):
                request.note_place()
                return
        if place:
            self.release(request, is_kept=False)
        request.note_place()
