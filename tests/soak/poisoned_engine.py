"""Poisons the engine's process; its window says so within five seconds and goes on after a click.

    python -m tests.soak.poisoned_engine --rounds 50 --seed 1

The poisons are SIGSEGV, SIGKILL, SIGSTOP, `abort` and a wrong address in native code; a limit of
memory that is met while it reads a prompt; and a model's file that is cut short while it is read,
which would be SIGBUS if it were mapped. Signals come while the engine is idle, loads, reads a
prompt, answers, or splits the model anew.
"""

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from tests.soak.campaign import Report, run_campaign
from tests.soak.engine_kills import TOLD_S, EngineKills, engine_of, see_recovery, settled
from tests.soak.phases import LONG_PROMPT, Phase, middling_model
from tests.soak.remains import descendants, still_alive
from tests.soak.window import POISONABLE, Window, WindowProblem

MAX_ADDED = 8 << 20
"""Bytes that an engine whose memory is limited may take besides what it has, at most."""

CUT_FILE = "cut file"
MEMORY = "memory limit"
SHORT_OF_MEMORY = ("cpu has ", "The engine aborted after an internal error (SIGABRT) while ")
"""Beginnings of what the window may say then."""

WRONG_ADDRESS = "The engine crashed accessing an invalid memory address (SIGSEGV) while "

POISONS = {
    "SIGSEGV": (signal.SIGSEGV, WRONG_ADDRESS),
    "SIGKILL": (signal.SIGKILL, "The engine was killed (SIGKILL) while "),
    "SIGSTOP": (signal.SIGSTOP, "The engine was stopped by another program while "),
    "abort": (signal.SIGUSR1, SHORT_OF_MEMORY[1]),
    "wrong address": (signal.SIGUSR2, WRONG_ADDRESS),
}
"""Signals to the engine, see `poisonable_engine`, and beginnings of what the window says."""

PHASES = ("idle", "load", "prefill", "decode", "resplit")


class PoisonedEngine(EngineKills):
    """A window whose engine is poisoned again and again."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        super().__init__(home, seed)
        self._poisons = [only] if only else [*POISONS, MEMORY, CUT_FILE]
        self._phases["idle"] = Phase(lambda window: window.n_notes, lambda _: False, 0.5)
        self._variables = {POISONABLE: "1"}
        self.report = Report()

    def round(self, number: int) -> None:
        """Poison the engine in a phase, and bring it back.

        Raises:
            WindowProblem: something is lost, wrong or left behind, or comes too late.
        """
        name = self._poisons[number % len(self._poisons)]
        if name == MEMORY:
            self.report.add(MEMORY, self._limit_memory(self._running()))
            return
        if name == CUT_FILE:
            self.report.add(CUT_FILE, self._cut_file(self._running()))
            return
        in_phase = PHASES[number // len(self._poisons) % len(PHASES)]
        window, phase = self._running(), self._phases[in_phase]
        start = phase.enter(window)
        phase.wait(window, start, self._chance)
        figures = self._poison(window, *POISONS[name])
        self._go_on(window)
        self.report.add(f"{name} ({in_phase})", figures)

    def _poison(self, window: Window, number: signal.Signals, told: str) -> dict[str, float]:
        """Send a signal to the engine and see what the window makes of it."""
        engine = engine_of(window)
        family = {engine} | descendants(engine)
        before, at = window.n_notes, time.time()
        os.kill(engine, number)
        figures = see_recovery(window, before, at, told)
        if left := still_alive(family):
            raise WindowProblem(f"of the engine and what it started, these run on: {left}")
        return figures

    def _cut_file(self, window: Window) -> dict[str, float]:
        """Cut a file while it is loaded: the window says so, and the engine lives on."""
        path, engine = self._home / "cut.gguf", engine_of(window)
        shutil.copy(middling_model(self._home), path)
        start = window.do("open_model", path=str(path))
        window.wait(lambda note: note.get("state") == "loading", start)
        at = time.time()
        os.truncate(path, self._chance.randrange(path.stat().st_size))
        ended = window.wait(lambda note: "notice" in note or "loaded" in note, start, TOLD_S + 5)
        told_s = ended["at"] - at
        if engine_of(window) != engine or told_s > TOLD_S:
            raise WindowProblem(f"a file that was cut: {ended} after {told_s:.1f} s")
        if "notice" in ended and path.name not in ended["notice"]:
            raise WindowProblem(f"a file that was cut: {ended}")
        self._go_on(window)
        return {"told (cut file)": told_s}

    def _limit_memory(self, window: Window) -> dict[str, float]:
        """Have a new engine read a long prompt with next to no more memory than it has.

        It either lives on, and the next question is answered, or ends and is brought back.
        """
        self._poison(window, *POISONS["SIGKILL"])
        engine = engine_of(window)
        most = psutil.Process(engine).memory_info().data + self._chance.randrange(MAX_ADDED)
        resource.prlimit(engine, resource.RLIMIT_DATA, (most, most))
        start, at = window.do("ask", text=LONG_PROMPT, max_tokens=4), time.time()
        ended = window.wait(lambda note: "notice" in note or "text" in note, start, TOLD_S + 5)
        told_s = ended["at"] - at
        if not ended.get("notice", "").startswith(SHORT_OF_MEMORY) or told_s > TOLD_S:
            raise WindowProblem(f"without memory: {ended} after {told_s:.1f} s")
        if settled(window)["model"]:
            start = window.do("ask", text="hello", max_tokens=4)
            window.wait(lambda note: note.get("finished") == "length", start, TOLD_S)
            self._poison(window, *POISONS["SIGKILL"])
        else:
            see_recovery(window, start, at, *SHORT_OF_MEMORY)
        self._go_on(window)
        return {"told (memory)": told_s}


if __name__ == "__main__":
    sys.exit(run_campaign(PoisonedEngine, __doc__ or ""))
