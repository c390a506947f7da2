"""A driven window, as the campaign that started it sees it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Note = dict[str, Any]

REPO = Path(__file__).resolve().parents[2]
MARK = "TANDEM_SOAK"
"""Environment variable that a window and all that it starts inherit; other processes lack it."""

POISONABLE = "TANDEM_SOAK_POISONABLE"
"""Environment variable with which a window's engine crashes at signals, see `poisonable_engine`."""

WAIT_S = 120.0


class WindowProblem(AssertionError):
    """A thing that a window must not do, or a thing that it should have done."""


class Window:
    """A window in a process of its own, with its own home and folder for temporary files.

    Args:
        home: folder for all of its files.
        variables: more environment variables.

    Attributes:
        mark: value of `MARK` in the environment of the window and of all that it starts.
        started: time at which it was started.
    """

    def __init__(self, home: Path, variables: Mapping[str, str] | None = None) -> None:
        self.mark, self.started = uuid.uuid4().hex, time.time()
        self._notes: list[Note] = []
        self._changed = threading.Condition()
        self._errors = home / "stderr"
        _heed_signals()
        environment = {**_environment(home, self.mark), **(variables or {})}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.soak.driven_window"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=environment, start_new_session=True, cwd=home,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while the window runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """What it has written to its standard error."""
        return self._errors.read_text(errors="replace")

    def notes(self, start: int = 0) -> list[Note]:
        """Return what was seen in the window, from number `start` on."""
        with self._changed:
            return self._notes[start:]

    @property
    def n_notes(self) -> int:
        with self._changed:
            return len(self._notes)

    def do(self, name: str, **arguments: Any) -> int:
        """Have the window do something; return the number of the next note."""
        start = self.n_notes
        assert self._process.stdin is not None
        line = json.dumps({"do": name, **arguments}) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        return start

    def wait(
        self, is_wanted: Callable[[Note], bool], start: int = 0, seconds: float = WAIT_S
    ) -> Note:
        """Return the first note from number `start` on that is wanted.

        Raises:
            WindowProblem: there is none in time, or the window ends first.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            at = start
            while True:
                for note in self._notes[at:]:
                    if is_wanted(note):
                        return note
                at = max(at, len(self._notes))
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    break
                self._changed.wait(min(left, 1.0))
        recent = "\n".join(json.dumps(note)[:300] for note in _telling(self.notes(start)))
        why = f"waited in vain for {seconds} s (status {self.status})"
        raise WindowProblem(f"{why}; {recent}\n{self.errors[-3000:]}")

    def wait_for(self, key: str, start: int = 0, seconds: float = WAIT_S) -> Note:
        """Return the first note from number `start` on that has a key."""
        return self.wait(lambda note: key in note, start, seconds)

    def send_signal(self, number: int, *, to_group: bool = False) -> float:
        """Send a signal to the window, or as a terminal does to all its processes, too.

        Returns:
            The time just before.
        """
        at = time.time()
        if to_group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)
        return at

    def kill(self) -> float:
        """Kill the window alone, and return the time just before."""
        at = self.send_signal(signal.SIGKILL)
        self.wait_until_ended(WAIT_S)
        return at

    def close(self) -> int:
        """Close the window in order, and return its exit status."""
        self.send_signal(signal.SIGTERM)
        return self.wait_until_ended(WAIT_S)

    def wait_until_ended(self, seconds: float) -> int:
        """Wait for the window's end, read all its notes, and return its exit status."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise WindowProblem(f"the window runs on; {self.errors[-3000:]}") from None
        self._reader.join(seconds)  # its output stays open while any other process has it
        return status

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                note = json.loads(line)
                with self._changed:
                    self._notes.append(note)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _heed_signals() -> None:
    """Have programs that this one starts heed signals that it ignores itself.

    `nohup` and a shell's jobs in the background ignore some, and what they start would, too; unlike
    that, a handler is not inherited.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _telling(notes: list[Note]) -> list[Note]:
    """Return the last notes, apart from those of texts that are typed or answered."""
    return [note for note in notes if "draft" not in note and "text" not in note][-12:]


def _environment(home: Path, mark: str) -> dict[str, str]:
    """Return the environment of a window whose files all lie in `home`."""
    temporary, run = home / "tmp", home / "run"
    for folder in (temporary, run):
        folder.mkdir(mode=0o700, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "TANDEM_HOME"))}
    return kept | {
        "HOME": str(home), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(run),
        "PYTHONPATH": str(REPO), "QT_QPA_PLATFORM": "offscreen", "TANDEM_ENGINE": "process",
        MARK: mark,
    }  # fmt: skip
