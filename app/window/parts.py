"""How the parts of the application are made: each says which others it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, overload

Made = TypeVar("Made")


class Part(Generic[Made]):
    """Attribute that makes its value when it is first read, after the parts that it needs.

    Args:
        make: method that makes it.
        needs: names of the parts that have to be there.
        is_late: whether it is made when it is first used, not at the start.
    """

    def __init__(self, make: Callable[[Any], Made], needs: tuple[str, ...], is_late: bool) -> None:
        self.make, self.needs, self.is_late = make, needs, is_late
        self.name, self.__doc__ = make.__name__, make.__doc__

    @overload
    def __get__(self, shell: None, kind: type) -> Part[Made]: ...

    @overload
    def __get__(self, shell: object, kind: type) -> Made: ...

    def __get__(self, shell: object | None, kind: type) -> Part[Made] | Made:
        if shell is None:
            return self
        for name in self.needs:
            getattr(shell, name)
        made = shell.__dict__[self.name] = self.make(shell)  # found before this from now on
        return made


def part(
    *, needs: Iterable[str] = (), is_late: bool = False
) -> Callable[[Callable[[Any], Made]], Part[Made]]:
    """Return a decorator of a method that makes a part; see `Part`."""
    return lambda make: Part(make, tuple(needs), is_late)


def parts_of(kind: type) -> list[Part[Any]]:
    """Return the parts of a class, in the order in which they are declared."""
    return [one for base in kind.__mro__ for one in vars(base).values() if isinstance(one, Part)]


def make_parts(shell: object) -> None:
    """Make all parts that are not late, in the order in which they are declared."""
    for one in parts_of(type(shell)):
        if not one.is_late:
            getattr(shell, one.name)


def if_made(shell: object, name: str) -> Any:
    """Return a late part if it has been used, else None."""
    return shell.__dict__.get(name)
