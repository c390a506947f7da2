"""What the engine has computed of a chat, kept on disk: one opened again goes on at once.

The engine holds the keys and values of one chat at a time. Before another one is answered, or the
model goes, those of the last one are written to a file; before a chat is answered that has a file,
it is read back. What is missing, old or broken only costs time: the engine computes it again.
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
"""Fewer are computed in less time than it takes to read them."""

GIB = 1 << 30
LAST_S = 3.0
"""How long the window waits for the last file when it closes."""

SUFFIX = ".safetensors"


class ChatCache(QObject):
    """Files of one folder, which never has more than `max_bytes`; the oldest go first.

    Args:
        max_bytes: 0 for no files at all.
    """

    def __init__(self, folder: Path, client: EngineClient, max_bytes: int, parent: QObject) -> None:
        super().__init__(parent)
        self._folder, self._client, self._max_bytes = folder, client, max_bytes
        self._chat = ""  # whose tokens the engine holds
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
        """A chat is about to be answered: have the engine hold what is known of it."""
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
        """The engine is about to do something else: write what it holds, unless it is written."""
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
        """Write the last one, as far as there is time for it."""
        self.leave()
        self._client.finish_states(LAST_S)

    def delete(self, chat_id: str) -> None:
        """Nothing stays of a chat."""
        for path in self._files():
            if path.name.startswith(f"{chat_id}-"):
                _remove(path)
        if chat_id == self._chat:
            self._chat = ""

    def _path(self, chat_id: str) -> Path | None:
        """The file of a chat for the model that is loaded; None where there is to be none."""
        model = self._client.model
        if not chat_id or model is None or not model.model_hash or not self._max_bytes:
            return None
        return self._folder / f"{chat_id}-{model.model_hash[:16]}{SUFFIX}"

    def _n_bytes(self) -> int:
        """About so many bytes the file will have."""
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
        self._n_tokens = 0  # what is in the cache is not known

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
        """A file that is of no use goes, so that it is not tried again."""
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
    """Used again, so that it is not the oldest."""
    try:
        os.utime(path)
    except OSError as error:
        log.info("%s stays as old as it is: %s", path.name, error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s stays on disk: %s", path.name, error)
