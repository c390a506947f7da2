"""On-demand creation of the application's parts, along with their dependencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, overload

Made = TypeVar("Made")


class Part(Generic[Made]):
    """Attribute whose value is created on first access, after the parts it needs.

    Args:
        make: method that creates the value.
        needs: names of the parts to create first.
        is_late: whether the part is created on first use instead of at start-up.
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
        made = shell.__dict__[self.name] = self.make(shell)  # shadows this descriptor
        return made


def part(
    *, needs: Iterable[str] = (), is_late: bool = False
) -> Callable[[Callable[[Any], Made]], Part[Made]]:
    """Return a decorator for a method that creates a part; see `Part`."""
    return lambda make: Part(make, tuple(needs), is_late)


def parts_of(kind: type) -> list[Part[Any]]:
    """Return a class's parts, in declaration order."""
    return [one for base in kind.__mro__ for one in vars(base).values() if isinstance(one, Part)]


def make_parts(shell: object) -> None:
    """Create all parts that are not late, in declaration order."""
    for one in parts_of(type(shell)):
        if not one.is_late:
            getattr(shell, one.name)


def if_made(shell: object, name: str) -> Any:
    """Return a late part if it has been created, else None."""
    return shell.__dict__.get(name)
