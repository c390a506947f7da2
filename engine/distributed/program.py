"""Program that answers one prompt with the ranks of a model in processes, started by a launcher.

    torchrun --nproc-per-node 2 -m engine.distributed MODEL.gguf -p "Once upon a time" -n 64

The model code is the same as on ranks that are threads, and gives the same logits to the bit. All
processes follow the same steps; the first rank of the output head samples the tokens from the top-k
candidates of each rank, and sends them to the others. Rank 0 writes the text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np

from engine.config.load import LoadParams
from engine.config.sampling import SamplingParams
from engine.cpu.kernels.isa import chosen
from engine.devices.selection import parse_devices
from engine.distributed.process_runtime import ProcessRuntime, ProcessTokenSource
from engine.distributed.wire import GlooWire
from engine.errors import EngineError, NoDevice
from engine.forward.batch import Batch
from engine.generation.alone import run_alone
from engine.generation.generate import Generation
from engine.generation.prompts import Prompts
from engine.generation.results import Finished, GenerationEvent, TokenText
from engine.generation.session import Session
from engine.gguf.identity import model_hash
from engine.gguf.reader import GGUFFile
from engine.hardware.torch_devices import kind_of, torch_device
from engine.harmless import error_line, json_escaped, one_line, printable
from engine.models.info import describe

if TYPE_CHECKING:
    from engine.sampling.token_source import Logits
    from engine.text.tokenizer import Tokenizer

LIMIT_S = 300.0
"""Default number of seconds without data after which a rank that is waited for counts as lost."""


class RankGeneration(Generation):
    """A `Generation` whose tokens are sampled together with the other ranks.

    Args:
        source: token source of this rank; the other parameters are those of `Generation`.
    """

    def __init__(
        self, source: ProcessTokenSource, n_ctx: int, tokenizer: Tokenizer | None,
        params: SamplingParams, n_keep: int,
    ) -> None:  # fmt: skip
        super().__init__(n_ctx, tokenizer, params, n_keep)
        self._source = source

    def _sample(self, logits: Logits) -> int:
        return self._source.sample(logits, self._sampler, self._forbidden)


class RankModel:
    """A loaded model, of which this process is one rank; all processes make the same calls.

    Args:
        params: parameters of the load, equal in all processes.
        wire: connections to the other ranks.

    Attributes:
        runtime: runtime of this process's rank.

    Raises:
        EngineError: the file or the split cannot be used, or another rank is gone.
    """

    def __init__(self, params: LoadParams, wire: GlooWire) -> None:
        with GGUFFile.open(params.path) as file:
            name = params.devices[wire.rank]
            wire.introduce(name, _kind(name), model_hash(file))
            self._prompts = Prompts(file, describe(file).name, params.chat_template)
            self.runtime = ProcessRuntime(file, params, wire)
        wire.wait_for_all()
        self._session = Session(self.runtime)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on this rank's split, file and GPU that a person should see."""
        slower = tuple(fallback.sentence for fallback in self.runtime.fallbacks.current)
        return self.runtime.plan.warnings + self._prompts.warnings + slower

    def logits(self, ids: Sequence[int]) -> Logits | None:
        """Return the logits after each of `ids`, as a fresh sequence.

        Returns:
            F32 (len(ids), n_vocab) on the rank that samples; None on the others.
        """
        session, step = self._session, self.runtime.n_batch
        session.check(ids)
        session.begin()
        session.ids.clear()
        found = []
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            batch = Batch((session.place(start, len(some)),), 0)
            found.append(self.runtime.forward_whole(some, batch))
        rows = [x for x in found if x is not None]
        return np.concatenate(rows) if rows else None

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> Iterator[GenerationEvent]:
        """Generate as `engine.api.Model.generate` does; every rank yields all events."""
        wanted = self._prompts.plain(prompt)
        generation = RankGeneration(
            self.runtime.token_source, self.runtime.n_ctx, self._prompts.found, params,
            wanted.n_keep,
        )  # fmt: skip
        return run_alone(self._session, generation, wanted.ids)

    def close(self) -> None:
        """Free all memory; safe to call twice."""
        self.runtime.close()


def _kind(name: str) -> str:
    """Return the kind of a device of this host; ranks of one kind compute the same bits."""
    try:
        device = torch_device(name)
    except NoDevice:  # reported later, once the other processes know of this one
        return name
    return kind_of(device) if device.type == "cuda" else f"{name} {chosen()}"


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
        sampling = SamplingParams(
            temperature=options.temperature, max_tokens=options.n, seed=options.seed,
            ignore_eos=options.ignore_eos,
        )  # fmt: skip
        events = model.generate(options.prompt, sampling)
        _write(events, wire.rank, warnings, as_json=options.json)
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


def _write(
    events: Iterator[GenerationEvent], rank: int, warnings: Sequence[str], *, as_json: bool
) -> None:
    """Consume the events of an answer; rank 0 writes the text, or one JSON object at the end."""
    ids: list[int] = []
    text = ""
    for event in events:
        if isinstance(event, TokenText):
            ids += event.ids
            text += event.text
            if rank == 0 and not as_json:
                sys.stdout.write(printable(event.text) if sys.stdout.isatty() else event.text)
                sys.stdout.flush()
        elif isinstance(event, Finished) and rank == 0:
            speed = round(event.timings.decode_per_s, 2)
            found = {"ids": ids, "text": text, "reason": event.reason, "tokens_per_s": speed}
            found["warnings"] = warnings
            sys.stdout.write(f"{json_escaped(json.dumps(found))}\n" if as_json else "\n")
            sys.stdout.flush()


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
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m engine.distributed",
        description="Answer one prompt, with one rank of the model in each process.",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-p", "--prompt", required=True, help="text to continue")
    parser.add_argument("-n", type=int, default=128, help="tokens at most (default: %(default)s)")
    parser.add_argument("--devices", default="", help="device of each process (default: cpu)")
    parser.add_argument("--split", default="", help="share of each process, as 3,1")
    parser.add_argument("--split-mode", default="tensor", choices=("tensor", "layer"))
    parser.add_argument("--ctx", type=int, help="context in tokens")
    parser.add_argument("--threads", type=int, help="CPU threads of all processes on one host")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at end-of-text")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S,
        help="seconds to wait for a process that sends nothing (default: %(default)s)",
    )  # fmt: skip
    return parser
