"""Program that answers prompts with the ranks of a model in processes, started by a launcher.

    torchrun --nproc-per-node 2 -m engine.distributed MODEL.gguf -p "Once upon a time" -n 64

Rank 0 decides what is computed, samples the tokens and writes the text; the others follow it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
from engine.config.load import LoadParams
from engine.config.sampling import SamplingParams
from engine.devices.selection import parse_devices
from engine.distributed.rank_model import RankModel
from engine.distributed.wire import GlooWire
from engine.errors import EngineError
from engine.generation.results import Finished, GenerationEvent, TokenText
from engine.harmless import error_line, json_escaped, one_line, printable

LIMIT_S = 300.0
"""Default number of seconds without data after which a rank that is waited for counts as lost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Generate text with the other processes; return the exit status."""
    options = _parser().parse_args(argv)
    wire = None
    try:
        wire = GlooWire(options.limit)
        model = RankModel(_params(options, len(wire.peers)), wire)
        warnings = model.warnings
        for warning in warnings:
            print(f"rank {wire.rank}: {one_line(warning)}", file=sys.stderr, flush=True)  # noqa: T201
        if model.leader is None:
            model.follow()
        else:
            sampling = SamplingParams(
                temperature=options.temperature, max_tokens=options.n, seed=options.seed,
                ignore_eos=options.ignore_eos,
            )  # fmt: skip
            answers = [model.leader.generate(prompt, sampling) for prompt in options.prompt]
            _write(answers, warnings, as_json=options.json)
        model.close()
        wire.close()
    except EngineError as error:
        _leave(error, wire)
    return 0


def _leave(error: EngineError, wire: GlooWire | None) -> None:
    """Print an error and exit at once: connections to processes that are gone may never close."""
    rank = "" if wire is None else f"rank {wire.rank}: "
    if wire is not None:
        wire.tell(error)
    sys.stdout.flush()
    print(f"{rank}{error_line(error.message, error.hint)}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


class PrintedAnswer:
    """What an answer has said, and how much of it is written.

    Attributes:
        is_over: whether its last event has come.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._text, self._n_written = "", 0
        self._end: Finished | None = None

    @property
    def is_over(self) -> bool:
        return self._end is not None

    def take(self, event: GenerationEvent) -> None:
        """Note an event."""
        if isinstance(event, TokenText):
            self._ids += event.ids
            self._text += event.text
        elif isinstance(event, Finished):
            self._end = event

    def rest(self) -> str:
        """Return the text that this was not called for yet."""
        found = self._text[self._n_written :]
        self._n_written = len(self._text)
        return found

    def as_json(self, warnings: Sequence[str]) -> str:
        """Return the whole answer as a JSON object."""
        assert self._end is not None, "it has ended"
        speed = round(self._end.timings.decode_per_s, 2)
        found = {"ids": self._ids, "text": self._text, "reason": self._end.reason}
        return json_escaped(json.dumps({**found, "tokens_per_s": speed, "warnings": warnings}))


def _write(
    events: Sequence[Iterator[GenerationEvent]], warnings: Sequence[str], *, as_json: bool
) -> None:
    """Write answers, which are computed side by side, one after the other.

    Args:
        events: events of each answer.
        warnings: sentences that JSON objects have beside the answer.
        as_json: whether each is an object in a line of its own, or else text as it comes.
    """
    waiting = [PrintedAnswer() for _ in events]
    for answer, event in _in_turn(events, waiting):
        answer.take(event)
        while waiting and (waiting[0].is_over or not as_json):
            text = waiting[0].as_json(warnings) if as_json else waiting[0].rest()
            is_screen = sys.stdout.isatty() and not as_json
            sys.stdout.write(printable(text) if is_screen else text)
            if not waiting[0].is_over:
                break
            sys.stdout.write("\n")
            waiting.pop(0)
        sys.stdout.flush()


def _in_turn(
    events: Sequence[Iterator[GenerationEvent]], answers: Sequence[PrintedAnswer]
) -> Iterator[tuple[PrintedAnswer, GenerationEvent]]:
    """Yield the events of answers in turn, each with its answer, until all have ended."""
    running = list(zip(events, answers, strict=True))
    while running:
        for one in list(running):
            event = next(one[0], None)
            if event is None:
                running.remove(one)
            else:
                yield one[1], event


def _params(options: argparse.Namespace, n_ranks: int) -> LoadParams:
    """Return the parameters of the load from the command line's options.

    Raises:
        EngineError: there is not one device for each process, or the split is no list of numbers.
    """
    devices = tuple(parse_devices(options.devices)) if options.devices else ("cpu",) * n_ranks
    if len(devices) != n_ranks:
        raise EngineError(
            f"There are {n_ranks} processes for {len(devices)} devices.",
            "Name one device for each process.",
        )
    try:
        split = [float(share) for share in options.split.split(",")] if options.split else None
    except ValueError:
        raise EngineError(
            f"The split '{options.split}' is not a list of numbers.", "Write it as 3,1."
        ) from None
    return LoadParams(
        path=options.model, devices=devices, split=None if split is None else tuple(split),
        split_mode=options.split_mode, n_ctx=options.ctx, cpu_threads=options.threads,
        parallel=options.parallel, mmproj="off",
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m engine.distributed",
        description="Answer prompts, with one rank of the model in each process.",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument(
        "-p", "--prompt", required=True, action="append",
        help="text to continue; several are answered at once, and written one after the other",
    )  # fmt: skip
    parser.add_argument("-n", type=int, default=128, help="tokens at most (default: %(default)s)")
    parser.add_argument("--devices", default="", help="device of each process (default: cpu)")
    parser.add_argument("--split", default="", help="share of each process, as 3,1")
    parser.add_argument("--split-mode", default="tensor", choices=("tensor", "layer"))
    parser.add_argument("--ctx", type=int, help="context in tokens")
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N",
        help="room for N prompts and answers of the whole context length (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads of all processes on one host")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at end-of-text")
    parser.add_argument("--json", action="store_true", help="write one JSON object for each answer")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S,
        help="seconds to wait for a process that sends nothing (default: %(default)s)",
    )  # fmt: skip
    return parser
