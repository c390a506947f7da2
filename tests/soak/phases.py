"""The phases of a window's life in which campaigns disturb it, and a known answer."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from app.core.paths import demo_model
from tests.helpers.tiny_gguf import tiny_gguf
from tests.soak.window import Note, Window, WindowProblem

QUESTION = "What is tensor parallelism?"
LONG_PROMPT = "tensor world " * 500
"""Question of about a thousand tokens, which the middling model reads in a second."""

FILLING_PROMPT = "tensor world " * 1600
"""Question of about 3,200 tokens, beside which a second chat has no room in 4,096."""

ENDLESS = 100_000


def middling_model(folder: Path) -> Path:
    """Return a random model of 72 MB: it loads in 0.2 s and splits anew in about as long."""
    path = folder / "middling.gguf"
    if not path.exists():
        tiny_gguf(
            path, n_layer=4, n_embd=1024, n_head=16, n_head_kv=16, n_ff=4096, n_ctx=4096,
            quant="Q8_0",
        )  # fmt: skip
    return path


@dataclass
class Phase:
    """A phase of a window's life.

    Attributes:
        enter: brings a window with the middling model there and returns the note number from
            which on `is_over` may find the phase's end.
        is_over: returns whether a note says that the phase has ended.
        seconds: about how long the phase lasts; what was seen last counts more.
        n_met, n_missed: how often a window was in the phase when it was disturbed, and how often
            the phase was already over.
    """

    enter: Callable[[Window], int]
    is_over: Callable[[Note], bool]
    seconds: float
    n_met: int = field(default=0, init=False)
    n_missed: int = field(default=0, init=False)

    def wait(self, window: Window, start: int, chance: random.Random) -> None:
        """Wait for a random moment of the phase."""
        deadline = time.monotonic() + chance.uniform(0, self.seconds)
        while time.monotonic() < deadline:
            time.sleep(0.005)
            if any(self.is_over(note) for note in window.notes(start)):
                return

    def count(self, began: float, notes: list[Note], at: float) -> None:
        """Note whether the phase was still on at a time, and how long it lasts.

        Args:
            began: time at which the phase began.
            notes: what was seen since then.
        """
        over = next((note["at"] for note in notes if self.is_over(note)), None)
        if over is None or over > at:
            self.n_met += 1
        else:
            self.n_missed += 1
            self.seconds = 0.7 * self.seconds + 0.3 * (over - began)


def _load(window: Window) -> int:
    """Load the middling model again."""
    start = window.do("open_model", path=str(_MODEL["path"]))
    window.wait(lambda note: note.get("state") == "loading", start)
    return start


def _prefill(window: Window) -> int:
    start = window.do("ask", text=LONG_PROMPT, max_tokens=ENDLESS)
    window.wait(lambda note: note.get("state") == "generating", start)
    return start


def _decode(window: Window) -> int:
    start = window.do("ask", text="hello", max_tokens=ENDLESS)
    window.do("type_text")
    window.wait_for("text", start)
    return window.n_notes


def _branch(window: Window) -> int:
    """Answer a question twice, and then one in other words, while somebody types."""
    _decode(window)
    start = window.do("regenerate")
    window.wait_for("text", start)
    start = window.do("reword", text="hello again")
    window.wait_for("text", start)
    return window.n_notes


def _resplit(window: Window) -> int:
    """Split the model anew in the middle of an answer, over two ranks or one."""
    _decode(window)
    n_ranks = [note["resplit"] for note in window.notes() if "resplit" in note]
    start = window.do("split", n_ranks=1 if n_ranks and n_ranks[-1] == 2 else 2)
    window.wait(lambda note: note.get("state") == "loading", start)
    return start


def _save(window: Window) -> int:
    """Have the cache of a chat saved, since another chat is answered and may need its room."""
    start = window.do("ask", text=FILLING_PROMPT, max_tokens=4)
    window.wait_for("finished", start)
    start = window.do("ask", text="hello", max_tokens=ENDLESS)
    window.wait_for("saving", start)
    return start


_MODEL: dict[str, Path] = {}


def make_phases(folder: Path) -> dict[str, Phase]:
    """Return all phases by name; their model lies in `folder`."""
    _MODEL["path"] = middling_model(folder)
    return {
        "load": Phase(_load, lambda note: "loaded" in note, 0.3),
        "prefill": Phase(_prefill, lambda note: note.get("read", 0) == note.get("of", -1), 1.0),
        "decode": Phase(_decode, lambda note: "finished" in note, 2.0),
        "branch": Phase(_branch, lambda note: "finished" in note, 2.0),
        "resplit": Phase(_resplit, lambda note: "resplit" in note, 0.3),
        "saving": Phase(_save, lambda note: "state_saved" in note, 0.1),
    }


def open_middling(window: Window) -> None:
    """Load the middling model and wait for it."""
    open_model(window, _MODEL["path"])


def open_model(window: Window, path: Path) -> None:
    start = window.do("open_model", path=str(path))
    window.wait(lambda note: note.get("loaded") == str(path), start)


def known_answer(window: Window) -> str:
    """Return what the demo answers to a known question; the chat is deleted afterwards."""
    path = demo_model()
    assert path is not None
    open_model(window, path)
    start = window.do("ask", text=QUESTION, max_tokens=64, ignore_eos=False)
    window.wait_for("finished", start)
    start = window.do("look")
    found = window.wait_for("shown", start)
    if found["problem"] or found["busy"]:
        raise WindowProblem(f"the known question was not answered: {found}")
    start = window.do("delete_chat", chat=found["chat"])
    window.wait_for("deleted", start)
    return str(found["shown"])
