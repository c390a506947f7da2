"""What must be on the disk: the chats of earlier rounds, and what was shown since."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from app.chat.store import ChatStore
from tests.soak.window import Note, WindowProblem

LOST_S = 1.0
"""Age of text, in seconds, that may be lost with a killed process."""

Chats = dict[str, dict[str, Any]]


class Ledger:
    """The chats that a home must have.

    Attributes:
        chats: chats as they were stored when last looked at, by id.
        most_lost_s: age of the oldest text that was lost so far, in seconds.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / ".local/share/Tandem/chats"
        self.chats: Chats = {}
        self.most_lost_s = 0.0

    def check(self, notes: Sequence[Note], until: float, allowed_s: float = LOST_S) -> None:
        """Check what is stored against what was shown, and remember it.

        Args:
            notes: what was seen in the window since the last check.
            until: time at which the window was killed or closed.
            allowed_s: age of text and drafts that may be missing, in seconds.

        Raises:
            WindowProblem: a chat is gone, damaged or changed, or lacks older text.
        """
        stored = self._stored()
        deleted = {note["deleted"]: note["at"] for note in notes if "deleted" in note}
        touched = {note["chat"] for note in notes if "chat" in note}
        for chat, old in self.chats.items():
            if chat in deleted:
                if chat in stored and deleted[chat] <= until - allowed_s:
                    raise WindowProblem(f"chat {chat} was deleted, and is there again")
            elif chat not in stored:
                raise WindowProblem(f"chat {chat} is gone")
            else:
                _check_old(old, stored[chat], is_touched=chat in touched)
        before = [note for note in notes if note["at"] <= until]
        for chat in touched - set(deleted):
            self._check_texts(chat, before, stored.get(chat), until, allowed_s)
            _check_draft(chat, before, stored.get(chat), until - allowed_s)
        self.chats = stored

    def _stored(self) -> Chats:
        """Return the chats that a window would find; each is whole."""
        store = ChatStore(self._folder)
        found = {chat.id: chat.to_json() for chat in store.load()}
        if store.database.set_aside or len(found) != len(store.summaries()):
            raise WindowProblem(f"damaged chats; {store.database.set_aside} set aside")
        store.database.close()
        return found

    def _check_texts(
        self,
        chat: str,
        notes: Iterable[Note],
        stored: dict[str, Any] | None,
        until: float,
        allowed_s: float,
    ) -> None:
        """Check the questions and answers of one chat, in all their versions."""
        messages = stored["messages"] if stored else []
        contents = {message["id"]: message["content"] for message in messages}
        shown: dict[int, str] = {}
        for note in notes:
            if note.get("chat") != chat or not ("text" in note or "asked" in note):
                continue
            number = note["message"]
            shown[number] = shown.get(number, "") + note.get("text", note.get("asked"))
            content = contents.get(number, "")
            if len(content) < len(shown[number].strip()):
                age = until - note["at"]
                self.most_lost_s = max(self.most_lost_s, age)
                if age > allowed_s:
                    n_shown = len(shown[number])
                    raise WindowProblem(
                        f"chat {chat}: {n_shown} characters were shown {age:.2f} s before the end,"
                        f" and {len(content)} are stored"
                    )
        for number, text in shown.items():
            content = contents.get(number, "")
            if not text.startswith(content) and content != text.strip():
                raise WindowProblem(f"chat {chat}: {content[:80]!r} was never shown")


def _check_old(old: dict[str, Any], new: dict[str, Any], *, is_touched: bool) -> None:
    """Check that a chat of an earlier round is as it was, or has grown."""
    n = len(old["messages"])
    is_kept = new["messages"][:n] == old["messages"] and new["title"] == old["title"]
    if not is_kept or (not is_touched and len(new["messages"]) != n):
        raise WindowProblem(f"chat {old['id']} has changed")


def _check_draft(
    chat: str, notes: Iterable[Note], stored: dict[str, Any] | None, until: float
) -> None:
    """Check that the stored draft was in the field at `until` or later."""
    drafts = [note for note in notes if "draft" in note and note["chat"] == chat]
    before = [note for note in drafts if note["at"] <= until]
    lengths = {note["draft"] for note in before[-1:]}
    lengths |= {note["draft"] for note in drafts if note["at"] > until}
    if before and (stored is None or len(stored["draft"]) not in lengths):
        n = len(stored["draft"]) if stored else None
        raise WindowProblem(f"chat {chat}: the draft has {n} characters, not {sorted(lengths)}")
