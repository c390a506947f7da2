"""The KV caches of chats on disk, so that a chat that is opened again goes on at once.

The engine holds the KV cache of one chat at a time. It is written to a file before another chat is
answered or the model is unloaded, and read back before the chat is answered again. A file that is
missing, old or broken only costs time: the engine computes the cache again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from PySide6.QtCore import QObject, Slot

from app.engine_client import EngineClient
from engine import EngineError, Finished, ModelLoaded, StateFileError, StateSaved

log = logging.getLogger(__name__)

MIN_TOKENS = 128
"""Smallest chat worth a file, in tokens: fewer are computed faster than they are read."""

LAST_S = 3.0
"""Longest wait for the last file when the window closes, in seconds."""

SUFFIX = ".safetensors"


class ChatCache(QObject):
    """The cache files of one folder; the oldest are deleted first.

    Args:
        max_bytes: most bytes of all files together; 0 for no files.
    """

    def __init__(self, folder: Path, client: EngineClient, max_bytes: int, parent: QObject) -> None:
        super().__init__(parent)
        self._folder, self._client, self._max_bytes = folder, client, max_bytes
        self._chat = ""  # id of the chat whose KV cache the engine holds
        self._n_tokens = 0
        self._is_saved = True
        client.loaded.connect(self._forget)
        client.unloaded.connect(self._forget)
        client.load_failed.connect(self._on_load_failed)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)
        client.state_saved.connect(self._on_saved)
        client.state_failed.connect(self._on_state_failed)

    def enter(self, chat_id: str) -> None:
        """Load the cache of a chat that is about to be answered, if there is a file."""
        if chat_id == self._chat:
            self._is_saved = False
            return
        self.leave()
        path = self._path(chat_id)
        if path is not None and path.is_file():
            _touch(path)
            self._client.load_state(str(path))
        self._chat, self._n_tokens, self._is_saved = chat_id, 0, False

    def leave(self) -> None:
        """Save the engine's cache, unless it is saved, before the engine does something else."""
        path = self._path(self._chat)
        if path is None or self._is_saved or self._n_tokens < MIN_TOKENS:
            return
        if self._n_bytes() > self._max_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.info("no folder for the caches of chats: %s", error)
            return
        self._is_saved = True
        self._client.save_state(str(path))

    def close(self) -> None:
        """Save the last cache, as far as there is time for it."""
        self.leave()
        self._client.finish_states(LAST_S)

    def delete(self, chat_id: str) -> None:
        """Delete all cache files of a chat."""
        for path in self._files():
            if path.name.startswith(f"{chat_id}-"):
                _remove(path)
        if chat_id == self._chat:
            self._chat = ""

    def _path(self, chat_id: str) -> Path | None:
        """Return the file of a chat's cache with the loaded model; None if there is to be none."""
        model = self._client.model
        if not chat_id or model is None or not model.model_hash or not self._max_bytes:
            return None
        return self._folder / f"{chat_id}-{model.model_hash[:16]}{SUFFIX}"

    def _n_bytes(self) -> int:
        """Estimate the size of the file, in bytes."""
        model = self._client.model
        if model is None:
            return 0
        return sum(m.measured.kv for m in model.memory) * self._n_tokens // max(1, model.n_ctx)

    @Slot()
    @Slot(object)
    def _forget(self, _: ModelLoaded | None = None) -> None:
        self._chat, self._n_tokens, self._is_saved = "", 0, True

    @Slot(object)
    def _on_load_failed(self, _: EngineError) -> None:
        if self._client.model is None:
            self._forget()

    @Slot(object)
    def _on_finished(self, finished: Finished) -> None:
        self._n_tokens = finished.usage.total_tokens

    @Slot(object)
    def _on_failed(self, _: EngineError) -> None:
        self._n_tokens = 0  # the contents of the cache are not known

    @Slot(object)
    def _on_saved(self, saved: StateSaved) -> None:
        log.info(
            "the cache of a chat was saved: %d tokens, %d bytes", saved.n_tokens, saved.n_bytes
        )
        files = sorted(self._files(), key=_age)
        sizes = [_size(path) for path in files]
        while files and sum(sizes) > self._max_bytes:
            _remove(files.pop(0))
            sizes.pop(0)

    @Slot(object)
    def _on_state_failed(self, error: EngineError) -> None:
        """Delete a file that cannot be used, so that it is not tried again."""
        log.info("the cache of a chat is not used: %s", error)
        if isinstance(error, StateFileError):
            _remove(Path(error.path))

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        except OSError:
            return []


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _touch(path: Path) -> None:
    """Mark a file as used now, so that it is not the oldest."""
    try:
        os.utime(path)
    except OSError as error:
        log.info("%s stays as old as it is: %s", path.name, error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s stays on disk: %s", path.name, error)
