"""On-disk KV caches for chats, so that chats continue without prefill after a restart.

The engine keeps the caches of several chats while they fit, so switching chats is free. Caches are
saved before the model is unloaded, before another chat may need their space, and, except for the
last chat, when the engine has been idle for a while. Before an answer in a chat other than the last
one, that chat's file is loaded; if it is missing or unusable, the cache is computed again.
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
"""Minimum tokens for a chat to get a file; with fewer, prefill is faster than reading."""

LAST_S = 3.0
"""Maximum seconds that a closing window waits for the last files."""

QUIET_MS = 20_000
"""Milliseconds that the engine must be idle before inactive chats are saved."""

GROWTH = 0.25
"""Fraction of one chat's context that must stay free for an answer."""

SUFFIX = ".safetensors"


@dataclass(slots=True)
class _Held:
    answer: RunningAnswer  # the chat's last answer
    n_before: int = 0  # tokens before that answer
    n_tokens: int = 0  # tokens including that answer; 0 while it is being written
    is_saved: bool = False

    @property
    def most_tokens(self) -> int:
        return self.n_tokens or self.n_before + self.answer.n_read + self.answer.meter.n_tokens


class ChatCache(QObject):
    """The cache files in a folder, at most `max_bytes` in total; the oldest are deleted first."""

    def __init__(self, folder: Path, client: EngineClient, max_bytes: int, parent: QObject) -> None:
        super().__init__(parent)
        self._folder, self._client, self._max_bytes = folder, client, max_bytes
        self._held: dict[str, _Held] = {}  # by chat id; the chat answered last is at the end
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
        """Load a chat's cache before an answer, unless that chat also had the last answer."""
        if chat_id == next(reversed(self._held), None):
            return
        self._make_room(chat_id)
        path = self._path(chat_id)
        if path is not None and path.is_file():
            _touch(path)
            self._client.load_state(str(path))

    def _make_room(self, chat_id: str) -> None:
        model = self._client.model
        others = [key for key, held in self._held.items() if key != chat_id and held.n_tokens]
        n_tokens = sum(held.most_tokens for held in self._held.values())
        if model is not None and n_tokens > model.n_ctx * (model.params.parallel - GROWTH):
            self._save(others)

    @Slot(object)
    def begin(self, written: WrittenAnswer) -> None:
        """Track a new answer."""
        before = self._held.pop(written.chat.id, None)
        n_before = before.n_tokens if before is not None else 0
        self._held[written.chat.id] = _Held(written.running, n_before)

    @Slot()
    def leave(self) -> None:
        """Save all unsaved caches, before the model is unloaded."""
        self._save(list(self._held))

    @Slot()
    def _await_quiet(self) -> None:
        if self._client.is_idle:
            self._quiet.start()
        else:
            self._quiet.stop()

    @Slot()
    def save_left(self) -> None:
        """Save the caches of all chats but the last one, if the engine is idle."""
        if self._client.is_idle:
            self._save(list(self._held)[:-1])

    def close(self) -> None:
        """Save the remaining caches within `LAST_S`."""
        self._quiet.stop()
        self.leave()
        self._client.finish_states(LAST_S)

    def _save(self, chat_ids: list[str]) -> None:
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
            log.info("cannot create the chats' cache folder: %s", error)
            return False
        return True

    def delete(self, chat_id: str) -> None:
        """Delete all of a chat's cache files."""
        for path in self._files():
            if path.name.startswith(f"{chat_id}-"):
                _remove(path)
        self._held.pop(chat_id, None)

    def _path(self, chat_id: str) -> Path | None:
        model = self._client.model
        if not chat_id or model is None or not model.model_hash or not self._max_bytes:
            return None
        return self._folder / f"{chat_id}-{model.model_hash[:16]}{SUFFIX}"

    def _n_bytes(self, n_tokens: int) -> int:
        model = self._client.model
        if model is None:
            return 0
        n_room = max(1, model.n_ctx * model.params.parallel)
        return sum(m.measured.kv for m in model.memory) * n_tokens // n_room

    @Slot()
    def _forget(self) -> None:
        self._held.clear()

    @Slot(object, object)
    def _on_finished(self, finished: Finished, answer: RunningAnswer) -> None:
        for held in self._held.values():
            if held.answer is answer:
                held.n_tokens = finished.usage.total_tokens

    @Slot(object, object)
    def _on_failed(self, _: EngineError, answer: RunningAnswer) -> None:
        self._held = {key: held for key, held in self._held.items() if held.answer is not answer}

    @Slot(object)
    def _on_saved(self, saved: StateSaved) -> None:
        log.info("a chat's cache was saved: %d tokens, %d bytes", saved.n_tokens, saved.n_bytes)
        files = sorted((*_age_and_size(path), path) for path in self._files())
        n_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if n_bytes <= self._max_bytes:
                break
            _remove(path)
            n_bytes -= size

    @Slot(object, object)
    def _on_state_failed(self, error: EngineError, command: SaveState | LoadState) -> None:
        log.info("a chat's cache is not used: %s", error)
        if isinstance(command, LoadState) and isinstance(error, StateFileError):
            _remove(Path(error.path))

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        except OSError:
            return []


def _age_and_size(path: Path) -> tuple[float, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0.0, 0
    return stat.st_mtime, stat.st_size


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as error:
        log.info("the timestamp of %s cannot be updated: %s", path.name, error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s cannot be deleted: %s", path.name, error)
