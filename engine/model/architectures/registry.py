"""Registry of architectures by their names in files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, TypeVar

from engine.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from engine.model.architectures.base import CausalLM

    ModelType = TypeVar("ModelType", bound=type[CausalLM])

_REGISTERED: dict[str, type[CausalLM]] = {}


def register(*architectures: str) -> Callable[[ModelType], ModelType]:
    """Return a decorator that registers a class for these values of `general.architecture`."""

    def add(cls: ModelType) -> ModelType:
        for name in architectures:
            assert name not in _REGISTERED, f"{name} is registered twice"
            _REGISTERED[name] = cls
        return cls

    return add


@cache
def _import_all() -> None:
    package = import_module("engine.model.architectures")
    for module in iter_modules(package.__path__):
        import_module(f"engine.model.architectures.{module.name}")


def supported_architectures() -> list[str]:
    """Return the names of all supported architectures, sorted."""
    _import_all()
    return sorted(_REGISTERED)


def is_supported(architecture: str) -> bool:
    """Return whether this architecture can be loaded."""
    _import_all()
    return architecture in _REGISTERED


def model_class(architecture: str, path: str) -> type[CausalLM]:
    """Return the class of an architecture.

    Raises:
        UnsupportedArchitecture: it is unknown; the error names `path`.
    """
    if not is_supported(architecture):
        raise UnsupportedArchitecture(path, architecture, supported_architectures())
    return _REGISTERED[architecture]
