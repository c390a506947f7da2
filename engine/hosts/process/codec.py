"""Messages between processes as bytes: JSON of declared types only.

The classes that may cross follow from the type hints of a union of messages: its dataclasses, those
in their fields, and `EngineError` with its subclasses. A dataclass becomes an object with its
class's name as "type" and all of its fields; a tuple becomes a list. Pickle is not used because it
would run the sender's code.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isclass
from string import Formatter
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from engine import errors
from engine.errors import EngineError, Sentence
from engine.planning.search.estimate import TuneEstimate
from engine.planning.search.results import Trial, TuneResult
from engine.vision.images.placed import VisionInfo

PROTOCOL = 1
"""Version of the format; messages with another version are refused."""

MAX_BYTES = 64 << 20
"""Maximum size of a message; a million tokens take an eighth of this."""

_LATE_NAMES = {
    "TuneEstimate": TuneEstimate, "Trial": Trial, "TuneResult": TuneResult,
    "VisionInfo": VisionInfo,
}  # fmt: skip
"""Classes that `engine.events` imports only for type checking."""

M = TypeVar("M")


class MessageError(EngineError):
    """Error for something that cannot be, or should not have been, sent between processes."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            "The window and the engine do not understand each other: {problem}.",
            "Restart Tandem, which may have been updated while it ran.",
            problem=problem,
        )
        self.problem = problem


SCALARS = frozenset({str, bool, int, float, NoneType})
"""Types that JSON supports directly."""


class Codec(Generic[M]):
    """Translator between messages and bytes.

    Args:
        messages: union of the dataclasses that can be sent.
    """

    def __init__(self, messages: object) -> None:
        self._messages = messages
        self._classes: dict[str, type] = {}
        self._collect(messages)

    @property
    def classes(self) -> tuple[type, ...]:
        """The dataclasses and errors that can cross."""
        return tuple(self._classes.values())

    def pack(self, message: M) -> bytes:
        """Return the bytes of a message.

        Raises:
            MessageError: it contains something that cannot cross, or is too large.
        """
        try:
            text = json.dumps([PROTOCOL, self._plain(message)], separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(
                Sentence("a message cannot be written ({why})", why=str(error))
            ) from error
        if len(text) > MAX_BYTES:
            raise MessageError(Sentence("a message of {n} MiB is too large", n=len(text) >> 20))
        return text.encode("ascii")

    def unpack(self, data: bytes) -> M:
        """Return the message that `pack` turned into these bytes.

        Raises:
            MessageError: it has another version, or is not one of the declared messages.
        """
        try:
            version, plain = json.loads(data.decode("ascii"))
        except (ValueError, TypeError, RecursionError) as error:
            raise MessageError("a message is damaged") from error
        if type(version) is not int or version != PROTOCOL:
            text = "a message has version {version}, not {ours}"
            raise MessageError(Sentence(text, version=str(version)[:20], ours=PROTOCOL))
        return cast(M, self._value(self._messages, plain))

    def _collect(self, hint: object) -> None:
        """Collect the classes that a type hint names, and those in their fields."""
        if isclass(hint) and issubclass(hint, EngineError):
            self._classes.update({found.__name__: found for found in _error_classes()})
        elif isclass(hint) and is_dataclass(hint):
            if self._classes.setdefault(hint.__name__, hint) is not hint:
                raise TypeError(f"two classes are named {hint.__name__}")
            if "type" in field_hints(hint):
                raise TypeError(f"{hint.__name__} has a field named type, as its class's name is")
            for inner in field_hints(hint).values():
                self._collect(inner)
        elif get_origin(hint) is not Literal:
            for inner in get_args(hint):
                self._collect(inner)

    def _plain(self, value: object) -> object:
        """Return a value as JSON types."""
        if isinstance(value, Sentence) and value:
            values = {name: self._plain(each) for name, each in value.values.items()}
            return {"type": "Sentence", "template": value.template, "values": values}
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, tuple | list):
            if SCALARS.issuperset(map(type, value)):  # for example the ids of a long text
                return value
            return [self._plain(item) for item in value]
        if isinstance(value, EngineError):
            return self._plain_error(value)
        name = type(value).__name__
        if self._classes.get(name) is not type(value):
            raise MessageError(Sentence("{name} cannot be sent", name=name))
        plain: dict[str, object] = {"type": name}
        for field in fields(value):  # type: ignore[arg-type]  # all other classes are dataclasses
            plain[field.name] = self._plain(getattr(value, field.name))
        return plain

    def _plain_error(self, error: EngineError) -> dict[str, object]:
        """Return an error as JSON types; if its class is not in `errors`, as its base class."""
        known = (base for base in type(error).__mro__ if base.__name__ in self._classes)
        base = next(known, None)
        if base is None:
            raise MessageError(Sentence("{name} cannot be sent", name=type(error).__name__))
        hints, values = error_hints(base), vars(error)
        plain = {name: self._plain(values[name]) for name in hints if name in values}
        return {"type": base.__name__, **plain}

    def _value(self, hint: Any, plain: object) -> object:
        """Return the value of type `hint` that a JSON value represents."""
        if isinstance(plain, dict):
            if plain.get("type") == "Sentence" and _allows(hint, Sentence):
                return self._sentence(plain)
            return self._instance(hint, plain)
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return self._one_of(inner, plain)
        if origin is Literal and isinstance(plain, str) and plain in inner:
            return plain
        if origin in (tuple, list) and isinstance(plain, list):
            items = self._items(inner, plain)
            return tuple(items) if origin is tuple else items
        if _is_scalar(hint, plain):
            return plain
        raise _unexpected(plain)

    def _one_of(self, hints: tuple[Any, ...], plain: object) -> object:
        """Return the value as the first of the types that fits."""
        for hint in hints:
            try:
                return self._value(hint, plain)
            except MessageError:
                continue
        raise _unexpected(plain)

    def _items(self, hints: tuple[Any, ...], plain: list[object]) -> list[object]:
        if len(hints) == 1 or (len(hints) == 2 and hints[1] is Ellipsis):
            if hints[0] in SCALARS and {hints[0]}.issuperset(map(type, plain)):
                return plain
            return [self._value(hints[0], item) for item in plain]
        if len(hints) != len(plain):
            raise _unexpected(plain)
        return [self._value(hint, item) for hint, item in zip(hints, plain, strict=True)]

    def _sentence(self, plain: dict[str, Any]) -> Sentence:
        template, values = plain.get("template"), plain.get("values")
        if not isinstance(template, str) or not isinstance(values, dict):
            raise _unexpected(plain)
        if not values:
            return Sentence(template)
        try:
            names = [field for field in Formatter().parse(template) if field[1] is not None]
            if any(name not in values or len(spec or "") > 4 for _, name, spec, _ in names):
                raise MessageError("a sentence was sent without its values")
            filled = {name: self._value(str | int | float, each) for name, each in values.items()}
            return Sentence(template, **cast(dict[str, str | int | float], filled))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise MessageError("a sentence was sent with invalid values") from error

    def _instance(self, hint: object, plain: dict[str, object]) -> object:
        """Return the dataclass or error that an object represents, if `hint` allows its class."""
        name = plain.get("type")
        cls = self._classes.get(name) if isinstance(name, str) else None
        if cls is None or not _allows(hint, cls):
            raise MessageError(Sentence("an unexpected '{name}' was sent", name=str(name)[:50]))
        is_error = issubclass(cls, EngineError)
        hints = error_hints(cls) if is_error else field_hints(cls)
        names, needed = set(plain) - {"type"}, {"message", "hint"} if is_error else set(hints)
        if not needed <= names <= set(hints):
            raise MessageError(Sentence("'{name}' was sent with the wrong fields", name=str(name)))
        values = {key: self._value(hints[key], plain[key]) for key in names}
        try:
            return _rebuilt(cls, values) if issubclass(cls, EngineError) else cls(**values)
        except (EngineError, TypeError, ValueError, KeyError) as error:
            text = "'{name}' was sent with invalid values"
            raise MessageError(Sentence(text, name=str(name))) from error


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = get_type_hints(cls, localns=_LATE_NAMES)
    return {field.name: hints[field.name] for field in fields(cls)}


@cache
def error_hints(cls: type) -> dict[str, Any]:
    """Return the types of an error's possible attributes: its constructors' arguments."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, EngineError) and "__init__" in vars(base):
            hints.update(get_type_hints(vars(base)["__init__"]))
    return {name: hint for name, hint in hints.items() if name not in ("return", "values")}


def _error_classes() -> list[type[EngineError]]:
    """Return all error classes in `engine.errors`."""
    found = [value for value in vars(errors).values() if isclass(value)]
    return [value for value in found if issubclass(value, EngineError)]


def _rebuilt(cls: type[EngineError], values: dict[str, object]) -> EngineError:
    """Return an error without calling its constructor, whose arguments depend on the class."""
    error = cls.__new__(cls)
    error.args = (values["message"], values["hint"])
    vars(error).update(values)
    return error


def _allows(hint: object, cls: type) -> bool:
    """Return whether a type hint is the class, a base of it, or a union with one of these."""
    if get_origin(hint) in (Union, UnionType):
        return any(_allows(inner, cls) for inner in get_args(hint))
    return isclass(hint) and issubclass(cls, hint)


def _is_scalar(hint: object, plain: object) -> bool:
    """Return whether a JSON value has a simple type; true is not a number, but 1 is a float."""
    if hint is float:
        return type(plain) in (int, float)
    return hint in (str, bool, int, NoneType) and type(plain) is hint


def _unexpected(plain: object) -> MessageError:
    return MessageError(Sentence("an unexpected {kind} was sent", kind=type(plain).__name__))
