"""Cost of the window: its decode speed relative to the command line's, and its longest stall.

    python -m tests.bench.window_speed [--model demo] [--seconds 60] [--rounds 3]

Alternates between answers on the command line and a chat in a real window (on whatever platform Qt
is told to use), each in its own process, and prints decode tokens/s of both, their ratio, and the
longest time for which the GUI thread did not return to its event loop. The window's part of a core,
without the engine, says more where other programs run. `TANDEM_ENGINE=thread`
puts the window's engine on a thread of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

PROMPT = "What is tensor parallelism?"
N_TOKENS = 400
TICK_MS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of chat in the window, per round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.window:
        sys.stdout.write(json.dumps(chat_in_window(args.model, args.seconds)) + "\n")
        return
    ratios, stalls = [], []
    for index in range(args.rounds):
        window = in_window(args.model, args.seconds)
        alone = median(on_command_line(args.model, len(window["tokens_per_s"])))
        ratios.append(median(window["tokens_per_s"]) / alone)
        stalls.append(window["longest_stall_ms"])
        report(
            f"round {index + 1}: command line {alone:.1f} t/s, window "
            f"{median(window['tokens_per_s']):.1f} t/s, ratio {ratios[-1]:.3f}, "
            f"{len(window['tokens_per_s'])} answers, longest stall {stalls[-1]:.0f} ms, "
            f"the window's process took {window['cpu_share']:.1%} of a core"
        )
    report(f"median ratio {median(ratios):.3f}, longest stall {max(stalls):.0f} ms")


def report(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def on_command_line(model: str, n_answers: int) -> list[float]:
    """Return the decode tokens/s of each answer of `tandem chat` to the same question."""
    command = [sys.executable, "-m", "app", "chat", model, "-n", str(N_TOKENS)]
    command += ["--temp", "0", "--ignore-eos", "--json"]
    typed = f"{PROMPT}\n/new\n" * n_answers
    out = subprocess.run(command, check=True, capture_output=True, text=True, input=typed).stdout
    return [float(turn["timings"]["decode_per_s"]) for turn in json.loads(out)["turns"]]


def in_window(model: str, seconds: float) -> Any:
    command = [sys.executable, "-m", "tests.bench.window_speed", "--window", "--model", model]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "TANDEM_HOME": home}
        out = subprocess.run(
            [*command, "--seconds", str(seconds)],
            check=True,
            capture_output=True,
            text=True,
            env=env,
        ).stdout
    return json.loads(out.splitlines()[-1])


def chat_in_window(model: str, seconds: float) -> dict[str, Any]:
    """Chat for `seconds`: each answer is followed by the next question."""
    from PySide6.QtCore import QTimer
    from PySide6.QtWidgets import QApplication

    from app.core.paths import demo_model
    from app.core.process.environment import chosen_host
    from app.main import Shell
    from engine import SamplingParams

    app = QApplication(sys.argv[:1])
    shell = Shell(app, chosen_host())
    shell.start()
    sampling = SamplingParams(
        temperature=0, max_tokens=N_TOKENS, ignore_eos=True, on_overflow="stop"
    )
    shell.window.sampling.set_params(sampling)
    rates: list[float] = []
    stalls: list[float] = []
    end, cpu_s = [float("inf")], [0.0]
    last = [time.perf_counter()]

    def tick() -> None:
        now = time.perf_counter()
        stalls.append(now - last[0] - TICK_MS / 1000)
        last[0] = now
        if now > end[0]:
            app.quit()

    def ask(*_: object) -> None:
        shell.session.new_chat("")
        shell.session.send(PROMPT)

    def on_loaded(*_: object) -> None:
        end[0], cpu_s[0] = time.perf_counter() + seconds, time.process_time()
        stalls.clear()
        ask()

    def on_finished(finished: Any) -> None:
        rates.append(finished.timings.decode_per_s)
        QTimer.singleShot(0, ask)

    shell.client.loaded.connect(on_loaded)
    shell.client.finished.connect(on_finished)
    timer = QTimer(interval=TICK_MS)
    timer.timeout.connect(tick)
    timer.start()
    shell.models.open(str(demo_model()) if model == "demo" else model)
    app.exec()
    share = (time.process_time() - cpu_s[0]) / seconds
    shell.close()
    return {"tokens_per_s": rates, "longest_stall_ms": 1000 * max(stalls), "cpu_share": share}


if __name__ == "__main__":
    main()
