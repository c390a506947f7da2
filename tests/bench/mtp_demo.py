"""MTP blocks for the demo model: trains them, and measures what they bring.

    python -m tests.bench.mtp_demo train demo-mtp.gguf      # a few minutes on 2 cores
    python -m tests.bench.mtp_demo measure demo-mtp.gguf
    python -m tests.bench.mtp_demo train demo-mtp.gguf --wide wide.gguf --columns 24576
    python -m tests.bench.mtp_demo train demo-mtp-3.gguf --blocks 3

The demo model itself stays as it is. Its weights are written with the blocks' as a file of the
architecture "glm4moe", whose dense form computes the same and may have such blocks. They learn what
the model finds next likely in conversations of the demo's recipe: of several, the k-th what it
finds likely k tokens later. Questions of the measurement are
held out; each is answered with and without guesses by turns, and the texts must be the same.

A token of so small a model takes as long as what Python does around it. `--wide` also writes it
with zeros as further columns of all FFNs: it says the same, and its weights take as long to read as
those of a larger model.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGUFWriter
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine import Finished, Model, SamplingParams, TokenText, load_model
from engine.decoding.drafting.control import DraftControl
from engine.generation.drafts import Drafts, MTPSource
from resources.demo import gguf_file
from resources.demo.corpus import Corpus
from resources.demo.network import Block, HParams, Llama
from resources.demo.text import Encoder
from resources.demo.train import IGNORE, MODEL, batches, keep_freed_memory, learning_rate
from tests.helpers.prophet import always

SEED = 7


class MTPBlock(nn.Module):
    """A block that guesses, as DeepSeek-V3 has it (arXiv 2412.19437, section 2.2)."""

    def __init__(self, trunk: Llama) -> None:
        super().__init__()
        hp: HParams = trunk.hp
        self.block = Block(hp)
        self.enorm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        self.hnorm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        self.eh_proj = nn.Linear(2 * hp.n_embd, hp.n_embd, bias=False)
        self.shared_head_norm = nn.RMSNorm(hp.n_embd, eps=hp.norm_eps)
        self.block.load_state_dict(trunk.blk[-1].state_dict())
        self.shared_head_norm.load_state_dict(trunk.output_norm.state_dict())

    def forward(self, embedded: Tensor, before: Tensor, turn: Tensor) -> Tensor:
        """Return outputs (batch, tokens, n_embd) of tokens and hidden states of those before."""
        joint = torch.cat((self.enorm(embedded), self.hnorm(before)), dim=-1)
        x, _ = self.block(self.eh_proj(joint), turn, None)
        return self.shared_head_norm(x)


@torch.no_grad()
def hidden_states(trunk: Llama, ids: Tensor) -> Tensor:
    """Return the trunk's states behind its last norm, (batch, tokens, n_embd)."""
    x = trunk.token_embd(ids)
    for block in trunk.blk:
        x, _ = block(x, trunk.turn[: ids.shape[1]], None)
    return trunk.output_norm(x)


def loss_of(trunk: Llama, blocks: nn.ModuleList, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the trunk's and the blocks' next tokens, within answers."""
    hidden = hidden_states(trunk, ids)
    before, losses = hidden, []
    for n, block in enumerate(blocks, 1):
        learned = (targets != IGNORE)[:, n:]
        with torch.no_grad():
            wanted = trunk.head(hidden[:, n:][learned]).softmax(-1)
            embedded = trunk.token_embd(ids[:, n:])
        before = block(embedded, before[:, :-1], trunk.turn[n : ids.shape[1]])
        losses.append(F.cross_entropy(trunk.head(before[learned]), wanted))
    return torch.stack(losses).mean()


def trained(steps: int, n_tokens: int, n_blocks: int) -> tuple[Llama, nn.ModuleList, Tokenizer]:
    """Return the demo model, blocks that were trained on it, and their tokenizer."""
    torch.manual_seed(SEED)
    keep_freed_memory()
    trunk, tokenizer = gguf_file.read(MODEL)
    trunk.requires_grad_(requires_grad=False)
    blocks = nn.ModuleList(MTPBlock(trunk) for _ in range(n_blocks))
    optimiser = torch.optim.AdamW(blocks.parameters(), betas=(0.9, 0.97), weight_decay=0.01)
    source = batches(Corpus(), Encoder(tokenizer), SEED, n_tokens, trunk.hp.n_ctx)
    mean = 0.0
    for step, (ids, targets, _) in enumerate(islice(source, steps)):
        optimiser.param_groups[0]["lr"] = learning_rate(step, steps, 2e-3)
        loss = loss_of(trunk, blocks, ids, targets)
        blocks.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimiser.step()
        mean += (loss.item() - mean) / min(step + 1, 20)
        if step % 20 == 0 or step == steps - 1:
            sys.stdout.write(f"step {step} loss {mean:.4f}\n")
            sys.stdout.flush()
    return trunk, blocks, tokenizer


def write(path: Path, trunk: Llama, blocks: nn.ModuleList, tokenizer: Tokenizer, n_ff: int) -> None:
    """Write both to a file whose FFNs have n_ff columns."""
    writer = GGUFWriter(path, "glm4moe")
    sizes = replace(trunk.hp, n_layer=trunk.hp.n_layer + len(blocks), n_ff=n_ff)
    gguf_file.write_metadata(writer, sizes, "Tandem Demo with MTP")
    writer.add_nextn_predict_layers(len(blocks))
    gguf_file.write_tokenizer(writer, tokenizer)
    tensors, n_more = _named(trunk, blocks), n_ff - trunk.hp.n_ff
    for name, tensor in tensors.items():
        if name.endswith("ffn_down.weight"):
            tensors[name] = F.pad(tensor, (0, n_more))
        elif name.endswith(("ffn_gate.weight", "ffn_up.weight")):
            tensors[name] = F.pad(tensor, (0, 0, 0, n_more))
    gguf_file.write_tensors(writer, tensors)


def _named(trunk: Llama, blocks: nn.ModuleList) -> dict[str, Tensor]:
    """Return all tensors by their names in files of the architecture."""
    found = dict(trunk.state_dict())
    for n, block in enumerate(blocks, trunk.hp.n_layer):
        for name, tensor in block.state_dict().items():
            part = f"nextn.{name}" if not name.startswith("block.") else name.removeprefix("block.")
            found[f"blk.{n}.{part}"] = tensor
    for name in list(found):
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            found[name] = _halves(found[name], trunk.hp.head_dim)
        elif name.endswith("ffn_norm.weight"):
            found[name.replace("ffn_norm", "post_attention_norm")] = found.pop(name)
    return found


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Return the rows of heads with pairs (0, 1), (2, 3) … as (0, d / 2), (1, d / 2 + 1) …"""
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def answered(model: Model, ids: list[int], temperature: float) -> tuple[list[int], Finished]:
    """Return the tokens of an answer, and its end."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=160)
    found, end = list[int](), None
    for event in model.generate(ids, params):
        if isinstance(event, TokenText):
            found += event.ids
        elif isinstance(event, Finished):
            end = event
    assert end is not None
    return found, end


def measure(path: Path, n_questions: int, rounds: int, draft_vocab: int) -> None:
    """Print how many guesses are right and how much faster answers come, by number of guesses."""
    _, tokenizer = gguf_file.read(MODEL)
    corpus, drawn = Corpus(held_out=True), random.Random(SEED)
    asked = [corpus.conversation(drawn, 1)[:-1] for _ in range(n_questions)]
    prompts = [Encoder(tokenizer).prompt(messages) for messages in asked]
    with load_model(path, n_ctx=512, draft="mtp", draft_vocab=draft_vocab) as model:
        for temperature in (0.0, 0.8):
            for most in (1, 3, 0):
                _compare(model, prompts, temperature, most, rounds)


def _compare(
    model: Model, prompts: list[list[int]], temperature: float, most: int, rounds: int
) -> None:
    """Print a line for guesses of a length, 0 for as many as the control chooses."""
    control: DraftControl = always() if most else DraftControl()
    guessing = Drafts(most or 3, [MTPSource(model.runtime.runner)], control)
    ratios, n_right, n_guessed = list[float](), 0, 0
    for turn in range(-1, rounds):  # the first one records
        took = [0.0, 0.0]
        for ids in prompts:
            texts = []
            for way, drafts in enumerate((Drafts(), guessing)):
                model.scheduler.drafts = drafts
                found, end = answered(model, ids, temperature)
                texts.append(found)
                took[way] += max(0, len(found) - 1) / end.timings.decode_per_s
            assert texts[0] == texts[1], "guesses have changed the text"
            if turn >= 0:
                n_right += end.usage.n_accepted
                n_guessed += end.usage.n_drafted
        if turn >= 0:
            ratios.append(took[0] / took[1])
    name = f"{most} guessed" if most else "as chosen"
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    share = n_right / max(1, n_guessed)
    sys.stdout.write(
        f"temperature {temperature}, {name}: {n_right} of {n_guessed} guesses right ({share:.2f}),"
        f" {median(ratios):.2f} times as fast ({each})\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Train or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("act", choices=("train", "measure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--blocks", type=int, default=1, help="number of blocks to train")
    parser.add_argument("--wide", type=Path, help="also write a wider model of the same texts")
    parser.add_argument("--columns", type=int, default=24576, help="columns of its FFNs")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=0, help="tokens guessed from; 0: all")
    args = parser.parse_args()
    if args.act == "train":
        trunk, blocks, tokenizer = trained(args.steps, args.batch, args.blocks)
        write(args.file, trunk, blocks, tokenizer, trunk.hp.n_ff)
        if args.wide:
            write(args.wide, trunk, blocks, tokenizer, args.columns)
    else:
        measure(args.file, args.questions, args.rounds, args.draft_vocab)


if __name__ == "__main__":
    main()
