"""Trains the demo model: tokenizer, network, GGUF file.

python -m resources.demo.train              # about 30 minutes on 2 free cores
python -m resources.demo.train --evaluate   # scores the file, about 2 minutes
"""

import argparse
import contextlib
import copy
import ctypes
import logging
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from resources.demo import gguf_file
from resources.demo.corpus import Corpus
from resources.demo.evaluate import evaluate
from resources.demo.network import HParams, Llama
from resources.demo.text import Encoder, train_tokenizer

log = logging.getLogger("demo.train")
MODEL = Path(__file__).with_name("tandem-demo.gguf")
IGNORE = -100
ANSWER_START = 8  # tokens
POOL = 24  # batches drawn at once and sorted by length, so that little is padded

Row = tuple[list[int], list[bool]]
Batch = tuple[Tensor, Tensor, Tensor]


def n_turns(rng: random.Random) -> int:
    """Most conversations are short; a few fill the context."""
    return rng.choices((1, 2, 3, 4, rng.randint(5, 16)), (46, 24, 14, 10, 6))[0]


def batches(
    corpus: Corpus, encoder: Encoder, seed: int, tokens: int, n_ctx: int
) -> Iterator[Batch]:
    """Endless (ids, targets, droppable) of about `tokens` tokens, padded at the right."""
    rng = random.Random(seed)
    while True:
        rows: list[Row] = []
        while sum(len(ids) for ids, _ in rows) < POOL * tokens:
            turns = n_turns(rng)
            ids, learn = encoder.conversation(corpus.conversation(rng, turns))
            end = beginning(learn) if turns <= 2 and rng.random() < 0.7 else n_ctx
            rows.append((ids[:end], learn[:end]))
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (pad(group) for group in groups if group)


def beginning(learn: list[bool]) -> int:
    """Where to cut a conversation so that only the start of its last answer is left.

    The first tokens decide which answer it becomes; the rest is soon known by heart, and training
    on all of it each time would take twice as long.
    """
    last = len(learn) - 1 - learn[::-1].index(True)
    return last + 1 - learn[last::-1].index(False) + ANSWER_START


def pad(rows: list[Row]) -> Batch:
    """Inputs and next-token targets (batch, tokens); only answers are learned."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), IGNORE)
    for i, (row, learn) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        after = torch.tensor(row[1:])
        targets[i, : len(row) - 1] = torch.where(torch.tensor(learn[1:]), after, IGNORE)
    return ids, targets, (targets == IGNORE) & (ids > 2)


def loss_of(model: Llama, batch: Batch, dropped: float) -> Tensor:
    """Mean cross-entropy over the answers, with a part of the question tokens hidden."""
    ids, targets, droppable = batch
    drop = droppable & (torch.rand(ids.shape) < dropped)
    hidden, _ = model.hidden(ids, drop=drop)
    learned = targets != IGNORE
    return F.cross_entropy(model.head(hidden[learned]), targets[learned])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 50 steps, then a cosine down to a fiftieth."""
    if step < 50:
        return peak * (step + 1) / 50
    done = (step - 50) / max(1, steps - 50)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(args: argparse.Namespace) -> tuple[Llama, Tokenizer]:
    """The averaged network after `args.steps` steps, and its tokenizer."""
    torch.manual_seed(args.seed)
    corpus, hp = Corpus(), HParams()
    tokenizer = train_tokenizer(corpus, hp.n_vocab, args.seed)
    model = Llama(hp)
    average = copy.deepcopy(model).eval()
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    source = batches(corpus, Encoder(tokenizer), args.seed, args.batch, hp.n_ctx)
    optimisers, progress = optimisers_for(model), Progress()
    for step in range(args.steps):
        for group in (group for o in optimisers for group in o.param_groups):
            group["lr"] = learning_rate(step, args.steps, args.lr)
        batch = next(source)
        loss = loss_of(model, batch, args.dropped)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        follow(average, model, min(args.ema, step / (step + 10)))
        progress.note(step, loss.item(), batch[0].numel())
        if args.save_every and (step + 1) % args.save_every == 0:
            gguf_file.write(args.out, average, tokenizer)
    return average, tokenizer


def optimisers_for(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and n.startswith("blk.")]
    others = [p for n, p in named.items() if p.ndim == 1 or not n.startswith("blk.")]
    return [
        torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.97), weight_decay=0.0, fused=True),
    ]


class Progress:
    """Logs the smoothed loss and the speed every hundred steps."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.tokens = 0
        self.loss = 0.0

    def note(self, step: int, loss: float, tokens: int) -> None:
        self.tokens += tokens
        self.loss += (loss - self.loss) / min(step + 1, 50)
        if step % 100 == 0:
            took = time.monotonic() - self.start
            speed = self.tokens / took
            log.info(
                "step %d loss %.4f, %.0f tokens/s, %.1f min", step, self.loss, speed, took / 60
            )


@torch.no_grad()
def follow(average: Llama, model: Llama, keep: float) -> None:
    """Move the averaged weights towards the model's."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)


def keep_freed_memory() -> None:
    """Stop glibc from giving each freed tensor back to the system.

    The page faults of fresh memory can cost several times more than the sums.
    """
    mmap_max, trim_threshold, top_pad = -4, -1, -2  # mallopt's names for them, from malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**28)):
            libc.mallopt(option, value)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--out", type=Path, default=MODEL, help="the GGUF file to write or to evaluate")
    option("--steps", type=int, default=4500)
    option("--batch", type=int, default=2048, help="tokens in a step")
    option("--lr", type=float, default=2e-3, help="highest learning rate")
    option("--ema", type=float, default=0.995, help="how much of the average a step keeps")
    option("--dropped", type=float, default=0.04, help="part of the question tokens to hide")
    option("--save-every", type=int, default=0, help="also write the file every so many steps")
    option("--seed", type=int, default=1)
    option("--threads", type=int, default=2)
    option("--evaluate", action="store_true", help="score the file instead of training")
    return parser.parse_args()


def main() -> None:
    """Train and write the file, or evaluate it."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    if args.evaluate:
        evaluate(args.out, args.seed)
    else:
        gguf_file.write(args.out, *train(args))


if __name__ == "__main__":
    main()
