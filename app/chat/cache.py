"""The KV caches of chats on disk, so that a chat goes on at once after a restart.

The engine keeps the caches of several chats as long as there is room, so another chat costs nothing
there. They are written to files before the model leaves, before another chat may need their room,
and those of chats that somebody has left when nothing has been done for a while. An answer in a
chat other than the last one reads its file, if the engine does not hold all of it. One that is
missing, old or broken only costs time: the engine computes the cache again.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Slot

from app.chat.answering import WrittenAnswer
from app.core.engine_client import EngineClient, RunningAnswer
from engine import EngineError, Finished, LoadState, SaveState, StateFileError, StateSaved

log = logging.getLogger(__name__)

MIN_TOKENS = 128
"""Smallest chat worth a file, in tokens: fewer are computed faster than they are read."""

LAST_S = 3.0
"""Longest wait for the last files when the window closes, in seconds."""

QUIET_MS = 20_000
"""Milliseconds without any work of the engine after which chats that were left are saved."""

GROWTH = 0.25
"""Share of a context for which there has to be room beside all chats when one is answered."""

SUFFIX = ".safetensors"


@dataclass(slots=True)
class _Held:
    """What the engine holds of a chat.

    Attributes:
        answer: the last answer in the chat, whose tokens the cache has.
        n_before: number of tokens before that answer.
        n_tokens: number of tokens with it; 0 while it is being written.
        is_saved: whether a file has all of it.
    """

    answer: RunningAnswer
    n_before: int = 0
    n_tokens: int = 0
    is_saved: bool = False

    @property
    def most_tokens(self) -> int:
        """Number of tokens that are there, as far as it is known."""
        return self.n_tokens or self.n_before + self.answer.n_read + self.answer.meter.n_tokens


class ChatCache(QObject):
    """The cache files of one folder; the oldest are deleted first.

    Args:
        max_bytes: most bytes of all files together; 0 for no files.
    """

    def __init__(self, folder: Path, client: EngineClient, max_bytes: int, parent: QObject) -> None:
        super().__init__(parent)
        self._folder, self._client, self._max_bytes = folder, client, max_bytes
        self._held: dict[str, _Held] = {}  # by the chat's id, the one answered last at the end
        self._quiet = QTimer(self, singleShot=True, interval=QUIET_MS)
        self._quiet.timeout.connect(self.save_left)
        client.state_changed.connect(self._await_quiet)
        client.loaded.connect(self._forget)
        client.unloaded.connect(self._forget)
        client.lost.connect(self._forget)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)
        client.state_saved.connect(self._on_saved)
        client.state_failed.connect(self._on_state_failed)

    @Slot(str)
    def enter(self, chat_id: str) -> None:
        """Load the cache of a chat that is about to be answered, unless it was the last one."""
        if chat_id == next(reversed(self._held), None):
            return
        self._make_room(chat_id)
        path = self._path(chat_id)
        if path is not None and path.is_file():
            _touch(path)
            self._client.load_state(str(path))

    def _make_room(self, chat_id: str) -> None:
        """Save the other chats if the one that is answered now may need their room soon."""
        model = self._client.model
        others = [key for key, held in self._held.items() if key != chat_id and held.n_tokens]
        n_tokens = sum(held.most_tokens for held in self._held.values())
        if model is not None and n_tokens > model.n_ctx * (model.params.parallel - GROWTH):
            self._save(others)

    @Slot(object)
    def begin(self, written: WrittenAnswer) -> None:
        """Note the answer that a chat gets now."""
        before = self._held.pop(written.chat.id, None)
        n_before = before.n_tokens if before is not None else 0
        self._held[written.chat.id] = _Held(written.running, n_before)

    @Slot()
    def leave(self) -> None:
        """Save the caches of all chats that are not saved, before the model leaves."""
        self._save(list(self._held))

    @Slot()
    def _await_quiet(self) -> None:
        if self._client.is_idle:
            self._quiet.start()
        else:
            self._quiet.stop()

    @Slot()
    def save_left(self) -> None:
        """Save the caches of all chats but the last one, if nothing is being done."""
        if self._client.is_idle:
            self._save(list(self._held)[:-1])

    def close(self) -> None:
        """Save the last caches, as far as there is time for it."""
        self._quiet.stop()
        self.leave()
        self._client.finish_states(LAST_S)

    def _save(self, chat_ids: list[str]) -> None:
        """Save those of these chats that are worth it, the last ones first, while there is room."""
        n_bytes = 0
        for chat_id in reversed(chat_ids):
            held, path = self._held[chat_id], self._path(chat_id)
            if path is None or held.is_saved or held.most_tokens < MIN_TOKENS:
                continue
            n_bytes += self._n_bytes(held.most_tokens)
            if n_bytes > self._max_bytes or not self._make_folder():
                return
            held.is_saved = True
            self._client.save_state(str(path), of=held.answer)

    def _make_folder(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.info("no folder for the caches of chats: %s", error)
            return False
        return True

    def delete(self, chat_id: str) -> None:
        """Delete all cache files of a chat."""
        for path in self._files():
            if path.name.startswith(f"{chat_id}-"):
                _remove(path)
        self._held.pop(chat_id, None)

    def _path(self, chat_id: str) -> Path | None:
        """Return the file of a chat's cache with the loaded model; None if there is to be none."""
        model = self._client.model
        if not chat_id or model is None or not model.model_hash or not self._max_bytes:
            return None
        return self._folder / f"{chat_id}-{model.model_hash[:16]}{SUFFIX}"

    def _n_bytes(self, n_tokens: int) -> int:
        """Estimate the size of a file, in bytes."""
        model = self._client.model
        if model is None:
            return 0
        n_room = max(1, model.n_ctx * model.params.parallel)
        return sum(m.measured.kv for m in model.memory) * n_tokens // n_room

    @Slot()
    def _forget(self) -> None:
        """Note that another model is loaded, or none."""
        self._held.clear()

    @Slot(object, object)
    def _on_finished(self, finished: Finished, answer: RunningAnswer) -> None:
        for held in self._held.values():
            if held.answer is answer:
                held.n_tokens = finished.usage.total_tokens

    @Slot(object, object)
    def _on_failed(self, _: EngineError, answer: RunningAnswer) -> None:
        """Forget a chat: what the engine has of it is not known."""
        self._held = {key: held for key, held in self._held.items() if held.answer is not answer}

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

    @Slot(object, object)
    def _on_state_failed(self, error: EngineError, command: SaveState | LoadState) -> None:
        """Delete a file that cannot be loaded; an older one stays where a new one has failed."""
        log.info("the cache of a chat is not used: %s", error)
        if isinstance(command, LoadState) and isinstance(error, StateFileError):
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
