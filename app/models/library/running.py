"""Which of the models on this machine is loaded, and which one is being loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.models.library.scan import FileIdentity, FoundModel, file_identity

Mark = Literal["", "loaded", "loading"]
"""What the engine does with a model of the library; "" for nothing."""


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A model file by the path under which it was opened.

    Attributes:
        identity: what tells it from others; None for models of servers and files that are gone.
    """

    path: str
    identity: FileIdentity | None

    @classmethod
    def at(cls, path: str) -> OpenedFile:
        """Return the file at a path, or what stands in the place of a path."""
        return cls(path, file_identity(path))

    def is_of(self, found: FoundModel) -> bool:
        """Return whether this is a model of the library, also by another name."""
        is_same = self.identity is not None and self.identity == found.identity
        return is_same or self.path == str(found.path)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """The model in use and the one that takes its place; None for none."""

    loaded: OpenedFile | None = None
    loading: OpenedFile | None = None

    @classmethod
    def at(cls, loaded: str, loading: str) -> RunningModel:
        """Return the models at these paths; "" is none."""
        return cls(
            OpenedFile.at(loaded) if loaded else None, OpenedFile.at(loading) if loading else None
        )

    def mark(self, found: FoundModel) -> Mark:
        """Return what the engine does with a model."""
        if self.loading is not None and self.loading.is_of(found):
            return "loading"
        return "loaded" if self.loaded is not None and self.loaded.is_of(found) else ""
