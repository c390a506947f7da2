"""Pauses of the window while its server answers clients, beside the same window without any.

    python -m tests.bench.served_window [--model demo] [--seconds 60] [--clients 8]

A real window, on whatever platform Qt is told to use, with the page of its server open; the engine
is in its own process, and the clients, which stream one answer after another, are in another. It is
left alone, then a person asks in one new chat after another; both again with the clients. A pause
is what `tests.bench.window_stalls` says. On a busy machine the clock shows what other programs
took; `own` is what the window's process has caused: work of the GUI thread, and its waits for other
threads. `waits` are all times in which the thread could not run, for locks and disks, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import httpx2
import numpy as np

from tests.bench.window_stalls import Pause, Session, print_line, write_old_chats

LIMIT_MS = 30
N_SHOWN = 5
LENGTHS = (10, 40, 120)
PERCENTILES = (50, 99, 99.9, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=60, help="of each part")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        ask_on(args.ask, args.clients)
        return
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        write_old_chats()
        play(args)


def play(args: argparse.Namespace) -> None:
    """Measure the window without clients, and with them."""
    session = Session()
    shell = session.shell
    session.until(lambda: shell.start_up.is_ready)
    session.open(args.model)
    shell.keep(replace(shell.settings.current, server_port=0))
    shell.window.show_dock(shell.window.server_dock, True)
    shell.serving.switch(True)
    session.until(lambda: bool(shell.serving.address))
    wait(session, 5)  # until what a load leads to is over
    measure(session, "no clients", args.seconds)
    clients = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.served_window", "--ask", shell.serving.address,
         "--clients", str(args.clients)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    session.until(lambda: len(shell.side_panels.server.table.rows.texts) >= args.clients)
    measure(session, f"{args.clients} clients", args.seconds)
    print_line(clients.communicate("stop")[0].strip())
    shell.window.close()


def measure(session: Session, part: str, seconds: float) -> None:
    """Report the pauses of a window that is left alone, then those with a chat."""
    session.watch.take()
    wait(session, seconds)
    report(part, session.watch.take())
    session.chat(seconds)
    report(f"{part}, and a chat", session.watch.take())


def wait(session: Session, seconds: float) -> None:
    end = time.perf_counter() + seconds
    session.until(lambda: time.perf_counter() > end)


def report(part: str, pauses: Sequence[Pause]) -> None:
    """Print percentiles of pauses, and the longest ones of the process's own."""
    clock = np.array([pause.clock_ms for pause in pauses])
    own = np.array([pause.own_ms for pause in pauses])
    waits = np.array([pause.clock_ms - pause.busy_ms - pause.queued_ms for pause in pauses])
    names = "/".join(f"p{p:g}" for p in PERCENTILES)
    print_line(f"{part}: {len(pauses)} turns, {names} in ms, and pauses above {LIMIT_MS} ms")
    for name, values in (("by the clock", clock), ("own", own), ("waits", waits)):
        found = " / ".join(f"{value:.1f}" for value in np.percentile(values, PERCENTILES))
        print_line(f"  {name:12} {found}, {(values > LIMIT_MS).sum()} above")
    for pause in sorted(pauses, key=lambda pause: -pause.own_ms)[:N_SHOWN]:
        print_line(
            f"  {pause.clock_ms:6.1f} ms: GUI thread {pause.busy_ms:.1f}, no processor free "
            f"{pause.queued_ms:.1f}, other threads {pause.others_ms:.1f}, own {pause.own_ms:.1f}"
        )


def ask_on(address: str, n_clients: int) -> None:
    """Have clients stream answers until a line comes in, and print how many they got."""
    is_over = threading.Event()
    counts: list[int] = []

    def ask(number: int) -> None:
        with httpx2.Client(base_url=address, trust_env=False, timeout=300) as client:
            for at in range(1_000_000):
                body = {
                    "messages": [{"role": "user", "content": f"Story {number}, {at}?"}],
                    "max_tokens": LENGTHS[at % len(LENGTHS)], "ignore_eos": True, "stream": True,
                }  # fmt: skip
                with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    reply.raise_for_status()
                    counts.append(sum(line.startswith("data: {") for line in reply.iter_lines()))
                if is_over.is_set():
                    return

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(n_clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    print_line(f"clients: {len(counts)} answers, {sum(counts) / seconds:.0f} events/s")


if __name__ == "__main__":
    main()
