"""A model of a real shape that edits the code in its prompt, for measuring guesses.

    python -m tests.bench.quoting Q4_K_M out.gguf [--replace kind=name ...]
    python -m tests.bench.drafts out.gguf -n 96 --rounds 5

Models with random weights (`synthetic`) quote nothing, so that guesses are right by chance. This
one is the same 1.2 B, and all its matrices have their full sizes and types, so that a pass takes
what that of a trained model takes; but some rows are made by hand, so that it answers as a model
would that was asked to rename something in a piece of code:

- One head of the first layer looks `lag` tokens back from the next token, by the angles of RoPE,
  and what it finds there outweighs all else. `lag` is the distance between the code in the prompts
  of `drafts` and its repetition, so the answer is that code, token by token.
- Tokens that end in a replaced word are copied as others. These are what guesses from the text get
  wrong, beside the places at which the code itself goes on in several ways. "shape" is every eighth
  token of that code, "kind" every twentieth.
- The words of these prompts are tokens, as most words of code are for a trained model.

It is no language model: it knows one edit of one text, greedily; to other prompts it answers
nonsense, and what it says at random says nothing of prose.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, sin, sqrt
from pathlib import Path

import numpy as np
import regex

from engine.text.encoders import LLAMA3
from tests.bench.drafts import PROMPTS
from tests.bench.random_blocks import Bytes, Shape, encoded
from tests.bench.synthetic import FIRST_WORD, MODELS, Sizes, random_tensor, typed, write_header
from tests.bench.whole_numbers import MOST, Numbers, blocks_of

REPLACED = ("kind=name",)
"""Words that are replaced, and by what, if nothing else is asked for."""

N_CODE = 64
"""Number of signs of a token's code, all of which one head carries."""

EMBEDDED = 0.5
"""Size of the elements of a token's embedding."""

COPIED = 4
"""Size of what is copied, as a multiple of what is there."""

N_ANGLES = 16
"""Number of pairs of a head that compare positions; those behind turn too slowly."""

SHARPNESS = 10.0
"""Size of a head's elements that compare positions."""

DAMPED = 0.05
"""Factor of what all other heads and FFNs add, so that they change no answer."""

LOGIT_SCALE = 0.035
"""Factor of the logits, so that those of the next tokens are about 20."""


def quoted_words(name: str = "editing") -> list[str]:
    """Return the words of a prompt of `drafts`, each of which is a token."""
    return regex.findall(LLAMA3, PROMPTS[name][0])  # type: ignore[no-any-return]


def lag_of(words: Sequence[str]) -> int:
    """Return the number of tokens between the code in a prompt and its repetition."""
    *_, first, again = (place for place, word in enumerate(words) if word == "def")
    return again - first


@dataclass(frozen=True)
class Part:
    """What replaces the first rows and columns of a matrix.

    Attributes:
        numbers: what the first rows and columns are.
        scale: factor of the numbers.
    """

    numbers: Numbers
    scale: float


class Circuit:
    """The parts made by hand.

    The elements of the residual stream are, by quarters: ones, by which positions are compared; the
    code of the token as which a token is copied, over and over; its own code, over and over, by
    which the output head (the embedding) tells tokens apart; and nothing.

    Args:
        words: tokens from `FIRST_WORD` on.
        copied_as: tokens that are copied as others, and those.
        lag: number of tokens between a token and what it is a copy of.
    """

    def __init__(
        self, sizes: Sizes, words: Sequence[str], copied_as: Mapping[str, str], lag: int
    ) -> None:
        assert sizes.tied
        assert sizes.n_rot == N_CODE
        assert sizes.n_embd % (4 * N_CODE) == 0
        self._sizes, self._copied_as, self._lag = sizes, copied_as, lag
        self._ids = {word: FIRST_WORD + n for n, word in enumerate(words)}
        self._quarter = sizes.n_embd // 4

    def parts(self) -> Mapping[str, Part]:
        """Return what replaces parts of matrices, by their names."""
        one = 1 / sqrt(0.75)  # element of an embedding behind its norm
        position = SHARPNESS / (MOST * one * self._quarter)
        n_copies = self._quarter // N_CODE
        return {
            "token_embd.weight": Part(self._embedding(), EMBEDDED),
            "blk.0.attn_q.weight": Part(self._angles(self._lag - 1), position),
            "blk.0.attn_k.weight": Part(self._angles(0), position),
            "blk.0.attn_v.weight": Part(self._read(), 1 / (one * n_copies)),
            "blk.0.attn_output.weight": Part(self._written(), COPIED * EMBEDDED),
        }

    def _embedding(self) -> Numbers:
        """Return the embeddings of all tokens that text is cut into."""
        n = FIRST_WORD + len(self._ids)
        codes = np.random.default_rng(0).choice(np.array([-1, 1], np.int8), (n, N_CODE))
        copied = codes.copy()
        for word, other in self._copied_as.items():
            copied[self._ids[word]] = codes[self._ids[other]]
        ones, copies = np.ones((n, self._quarter), np.int8), (1, self._quarter // N_CODE)
        return np.hstack((ones, np.tile(copied, copies), np.tile(codes, copies), 0 * ones))

    def _angles(self, turned: int) -> Numbers:
        """Return the rows of a head that give each pair the angle of a place `turned` before.

        The product of a query and a key not turned is largest where the key is `turned` back.
        """
        rows = np.zeros((N_CODE, self._sizes.n_embd), np.int8)
        for pair in range(N_ANGLES):
            angle = turned * self._sizes.rope_base ** (-2 * pair / N_CODE)
            rows[2 * pair, : self._quarter] = round(MOST * cos(angle))
            rows[2 * pair + 1, : self._quarter] = -round(MOST * sin(angle))
        return rows

    def _read(self) -> Numbers:
        """Return the rows of a head that read the code as which a token is copied."""
        rows = np.zeros((N_CODE, self._sizes.n_embd), np.int8)
        for column in range(self._quarter, 2 * self._quarter):
            rows[column % N_CODE, column] = 1
        return rows

    def _written(self) -> Numbers:
        """Return the columns of a block's heads, of which the first writes a token's own code."""
        columns = np.zeros((self._sizes.n_embd, 256), np.int8)
        for row in range(2 * self._quarter, 3 * self._quarter):
            columns[row, row % N_CODE] = 1
        return columns


def replacements(words: Sequence[str], replaced: Sequence[str]) -> dict[str, str]:
    """Return the words that end in a replaced one, and what they become.

    Args:
        replaced: such as "kind=name".
    """
    pairs = [one.split("=", 1) for one in replaced]
    return {
        word: word.removesuffix(old) + new
        for word in words
        for old, new in pairs
        if word.lstrip(" .({") == old
    }


def write_model(
    path: Path, sizes: Sizes, recipe_name: str, replaced: Sequence[str] = REPLACED
) -> Path:
    """Write the model and return `path`.

    Args:
        replaced: words that answers replace, see `replacements`.

    Raises:
        ValueError: numbers are not written as a type of this recipe.
    """
    text = quoted_words()
    copied_as = replacements(text, replaced)
    words = sorted({word for word in [*text, *copied_as.values()] if len(word) > 1})
    parts = Circuit(sizes, words, copied_as, lag_of(text)).parts()
    writer = write_header(path, sizes, recipe_name, words)
    for data in _tensors(sizes, recipe_name, parts):
        writer.write_tensor_data(data)
    writer.close()
    return path


def _tensors(sizes: Sizes, recipe_name: str, parts: Mapping[str, Part]) -> Iterator[Bytes]:
    rng = np.random.Generator(np.random.SFC64(0))
    for name, shape, kind in typed(sizes, recipe_name):
        if name == "output_norm.weight":
            yield encoded(kind, np.full(shape, LOGIT_SCALE, np.float32))
            continue
        is_damped = name.endswith(("attn_output.weight", "ffn_down.weight"))
        data = random_tensor(kind, shape, rng, DAMPED if is_damped else 1.0)
        if name in parts:
            _replace(data, kind, shape, parts[name])
        yield data


def _replace(data: Bytes, kind: int, shape: Shape, part: Part) -> None:
    """Write a part over a matrix."""
    new = blocks_of(kind, part.numbers, part.scale)
    data.reshape(shape[0], -1)[: len(new), : new.shape[1]] = new


def main(argv: Sequence[str] | None = None) -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=("Q4_K_M", "Q6_K", "F16", "BF16"), metavar="TYPE")
    parser.add_argument("file", type=Path)
    parser.add_argument("--replace", nargs="*", default=REPLACED, metavar="OLD=NEW")
    args = parser.parse_args(argv)
    begun = time.perf_counter()
    write_model(args.file, MODELS["llama-1b"], args.recipe, args.replace)
    seconds = time.perf_counter() - begun
    sys.stdout.write(f"{args.file.stat().st_size / 1e9:.2f} GB in {seconds:.1f} s\n")


if __name__ == "__main__":
    main()
