"""One rank of a model in this process, and the others in processes that a launcher has started.

    torchrun --nproc-per-node 2 -m engine.distributed MODEL.gguf -p "Once upon a time" -n 64

The same model code runs as on ranks that are threads, and gives the same logits to the bit. All
processes follow the same steps; the first rank of the output head draws the tokens, from the few
likeliest that each rank sends, and tells the others. Rank 0 writes what comes.
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

from engine.config import LoadParams, SamplingParams
from engine.cpu.kernels.isa import chosen
from engine.devices import parse_devices
from engine.distributed.process_runtime import Drawing, ProcessRuntime
from engine.distributed.wire import GlooWire
from engine.errors import EngineError, NoDevice
from engine.generation.generate import Generation
from engine.generation.prompts import Prompts
from engine.generation.results import Finished, GenerationEvent, TokenText
from engine.generation.session import Session
from engine.gguf import GGUFFile
from engine.gguf.identity import model_hash
from engine.hardware.torch_devices import kind_of, torch_device
from engine.models.info import describe
from engine.progress import never

if TYPE_CHECKING:
    from engine.sampling.token_source import Logits
    from engine.text import Tokenizer

LIMIT_S = 300.0
"""Seconds that a rank may compute without anything to give, before it is taken for lost."""


class RankGeneration(Generation):
    """An answer whose tokens are drawn together with the other ranks.

    Args:
        drawing: of this rank; the rest is as `Generation` has it.
    """

    def __init__(
        self, drawing: Drawing, session: Session, tokenizer: Tokenizer | None,
        params: SamplingParams, n_keep: int,
    ) -> None:  # fmt: skip
        super().__init__(session, tokenizer, params, n_keep, never)
        self._drawing = drawing

    def _sample(self, logits: Logits) -> int:
        return self._drawing.draw(logits, self._sampler, self._never)


class RankModel:
    """A loaded model, of which this process is one rank; all of them make the same calls.

    Raises:
        EngineError: the file or the split cannot be used, or another rank is gone.
    """

    def __init__(self, params: LoadParams, wire: GlooWire) -> None:
        with GGUFFile.open(params.path) as file:
            name = params.devices[wire.rank]
            wire.introduce(name, _kind(name), model_hash(file))
            self._prompts = Prompts(file, describe(file).name)
            self.runtime = ProcessRuntime(file, params, wire)
        wire.wait_for_all()
        self._session = Session(self.runtime)

    def logits(self, ids: Sequence[int]) -> Logits | None:
        """Logits after each of `ids`, as a fresh sequence, F32 (len(ids), n_vocab).

        They are on the rank that draws; None on the others.
        """
        session, step = self._session, self.runtime.n_batch
        session.check(ids)
        session.begin()
        session.ids.clear()
        found = [
            self.runtime.whole(ids[start : start + step], start, 0)
            for start in range(0, len(ids), step)
        ]
        rows = [x for x in found if x is not None]
        return np.concatenate(rows) if rows else None

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> Iterator[GenerationEvent]:
        """As `engine.api.Model.generate`; every rank has all events."""
        wanted = self._prompts.plain(prompt)
        return RankGeneration(
            self.runtime.token_source, self._session, self._prompts.found, params, wanted.n_keep
        ).run(wanted.ids)

    def close(self) -> None:
        """Free all memory; safe to call twice."""
        self.runtime.close()


def _kind(name: str) -> str:
    """What has this name on this host, so that those of a kind compute the same bits."""
    try:
        device = torch_device(name)
    except NoDevice:  # which is told once the others know of this process
        return name
    return kind_of(device) if device.type == "cuda" else f"{name} {chosen()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Generate text with the other processes; returns the exit status."""
    options = _parser().parse_args(argv)
    wire = None
    try:
        wire = GlooWire(options.limit)
        model = RankModel(_params(options, len(wire.peers)), wire)
        sampling = SamplingParams(
            temperature=options.temperature, max_tokens=options.n, seed=options.seed,
            ignore_eos=options.ignore_eos,
        )  # fmt: skip
        _write(model.generate(options.prompt, sampling), wire.rank, as_json=options.json)
        model.close()
        wire.close()
    except EngineError as error:
        _leave(error, wire)
    return 0


def _leave(error: EngineError, wire: GlooWire | None) -> None:
    """End with a sentence, at once: connections to processes that are gone may never close."""
    rank = "" if wire is None else f"rank {wire.rank}: "
    if wire is not None:
        wire.tell(error)
    sys.stdout.flush()
    print(f"{rank}{error} {error.hint}".strip(), file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


def _write(events: Iterator[GenerationEvent], rank: int, *, as_json: bool) -> None:
    """Show an answer, on one of the ranks."""
    ids: list[int] = []
    text = ""
    for event in events:
        if isinstance(event, TokenText):
            ids += event.ids
            text += event.text
            if rank == 0 and not as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        elif isinstance(event, Finished) and rank == 0:
            speed = round(event.timings.decode_per_s, 2)
            found = {"ids": ids, "text": text, "reason": event.reason, "tokens_per_s": speed}
            sys.stdout.write(f"{json.dumps(found)}\n" if as_json else "\n")
            sys.stdout.flush()


def _params(options: argparse.Namespace, n_ranks: int) -> LoadParams:
    """How the model is loaded.

    Raises:
        EngineError: there is not one device for each process, or the split is none.
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
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m engine.distributed",
        description="Answer one prompt, with one rank of the model in each process.",
    )
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-p", "--prompt", required=True, help="what the text begins with")
    parser.add_argument("-n", type=int, default=128, help="tokens at most (default: %(default)s)")
    parser.add_argument("--devices", default="", help="one for each process (default: cpu)")
    parser.add_argument("--split", default="", help="share of each process, as 3,1")
    parser.add_argument("--split-mode", default="tensor", choices=("tensor", "layer"))
    parser.add_argument("--ctx", type=int, help="context in tokens")
    parser.add_argument("--threads", type=int, help="of all processes of a host on its CPU")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S,
        help="seconds to wait for a process that gives nothing (default: %(default)s)",
    )  # fmt: skip
    return parser
