"""Reads the vocabulary of a GGUF file: its tokens, their kinds, and the special ones.

As in llama.cpp, some properties are derived from token names: which tokens end a generation, and
which only look like normal ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidGGUF, ModelFileError, Sentence

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata
    from engine.formats.gguf.reader import GGUFFile

KEY = "tokenizer.ggml."
MAX_TOKEN = 4096  # maximum characters in a token, so that a few tokens cannot fill a chat

# kinds of tokens, as bits, because a normal token can turn out to be a control token as well
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 8, 16, 32
KIND_OF_TYPE = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}

END_NAMES = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip
# fill-in-the-middle tokens are control tokens; the last three also end a generation
FILL_IN_NAMES = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> "
    "<|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# tokens in gpt-oss's answers that are never hidden
ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass
class Vocabulary:
    """The tokens of a model by id, with their kinds and roles.

    Args:
        tokens: raw spelling in the file.
        kinds: kind bits of each token; see above.
        scores: score of each token, for SPM; higher ones are merged first.
        eog_ids: ids of the tokens that end a generation.
        never_ids: ids of tokens that must never be sampled, e.g. image placeholders (Gemma 4).
        fill_in: ids of fill-in-the-middle tokens by role; see `FILL_IN_NAMES`.
        warnings: possible problems with the file.
    """

    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    ids: dict[str, int]
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    eog_ids: frozenset[int] = frozenset()
    never_ids: tuple[int, ...] = ()
    fill_in: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def kind(self, token_id: int) -> int:
        """Return a token's kind bits; 0 for an id beyond the vocabulary (padded embeddings)."""
        return self.kinds[token_id] if 0 <= token_id < len(self.kinds) else 0

    def plain_ids(self) -> dict[str, int]:
        """Return the ids of tokens that plain text may become: all except control tokens."""
        hidden = CONTROL | UNKNOWN
        return {text: i for text, i in self.ids.items() if not self.kinds[i] & hidden}


def file_of(meta: Metadata) -> Path:
    """Return the path of the metadata's file, for messages."""
    return Path(getattr(meta, "path", "The file"))


def read_vocabulary(meta: Metadata, is_spm: bool) -> Vocabulary:
    """Read and check the vocabulary.

    Raises:
        InvalidGGUF: it has no tokens, a duplicate or oversized token, or arrays that are too short.
    """
    tokens, ids = _read_tokens(meta)
    vocab = Vocabulary(tokens, _read_kinds(meta, len(tokens)), _read_scores(meta, len(tokens)), ids)
    vocab.bos_id = _special_id(meta, vocab, "bos", 1 if is_spm else None)
    vocab.eos_id = _special_id(meta, vocab, "eos", 2 if is_spm else None)
    vocab.unk_id = _special_id(meta, vocab, "unknown", 0 if is_spm else None)
    vocab.eog_ids = frozenset(_find_ends(meta, vocab))
    banned = meta.ints(KEY + "suppress_tokens", [])
    vocab.never_ids = tuple(sorted({i for i in banned if 0 <= i < len(tokens)}))
    return vocab


def _read_tokens(meta: Metadata) -> tuple[list[str], dict[str, int]]:
    tokens = list(meta.strs(KEY + "tokens")) if KEY + "tokens" in meta else []
    if not tokens:
        raise InvalidGGUF(file_of(meta), "it names a tokenizer but has no tokens")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN:
        raise InvalidGGUF(
            file_of(meta), "its vocabulary contains a token of {n} characters", n=longest
        )
    if "" in tokens:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise InvalidGGUF(
            file_of(meta), "its vocabulary contains the token {token} twice", token=repr(twice[:80])
        )
    return tokens, ids


def _read_kinds(meta: Metadata, n: int) -> list[int]:
    if KEY + "token_type" not in meta:
        return [NORMAL] * n
    types = meta.ints(KEY + "token_type")
    if len(types) < n:
        text = "it has {n} tokens but only {other} token types"
        raise InvalidGGUF(file_of(meta), text, n=n, other=len(types))
    return [KIND_OF_TYPE.get(kind, 0) for kind in types[:n]]


def _read_scores(meta: Metadata, n: int) -> list[float]:
    if KEY + "scores" not in meta:
        return [0.0] * n
    scores = meta.floats(KEY + "scores")
    if len(scores) < n:
        text = "it has {n} tokens but only {other} scores"
        raise InvalidGGUF(file_of(meta), text, n=n, other=len(scores))
    return [-math.inf if math.isnan(score) else score for score in scores[:n]]


def _special_id(
    meta: Metadata, vocab: Vocabulary, name: str, default: int | None = None
) -> int | None:
    """Return the id under `<name>_token_id`; ignore invalid ids with a warning."""
    n = len(vocab.tokens)
    if default is not None and default >= n:
        default = None
    key = f"{KEY}{name}_token_id"
    if key not in meta:
        return default
    token_id = meta.int(key, -1)
    if 0 <= token_id < n:
        return token_id
    text = "{key} is {id}, but there are only {n} tokens; it is ignored."
    vocab.warnings.append(Sentence(text, key=key, id=token_id, n=n))
    return default


def _find_ends(meta: Metadata, vocab: Vocabulary) -> set[int]:
    """Return the tokens that end a generation; correct the kinds of tokens known by name."""
    roles = {role: _fill_in_id(meta, vocab, role) for role in FILL_IN_NAMES}
    vocab.fill_in = {role: token for role, token in roles.items() if token is not None}
    for name in ALWAYS_SHOWN:
        if name in vocab.ids:
            vocab.kinds[vocab.ids[name]] = USER_DEFINED
    named = [_make_control(vocab, vocab.ids[name]) for name in END_NAMES & vocab.ids.keys()]
    given = [vocab.eos_id, _special_id(meta, vocab, "eot"), _special_id(meta, vocab, "eom")]
    given += [roles[role] for role in FILL_IN_ENDS]
    ends = {token_id for token_id in given + named if token_id is not None}
    _spare_inner_ends(vocab, ends)
    return ends


def _fill_in_id(meta: Metadata, vocab: Vocabulary, role: str) -> int | None:
    token_id = _special_id(meta, vocab, role)
    if token_id is not None:
        return token_id
    names = FILL_IN_NAMES[role].split()
    token_id = next((vocab.ids[name] for name in names if name in vocab.ids), None)
    return None if token_id is None else _make_control(vocab, token_id)


def _make_control(vocab: Vocabulary, token_id: int) -> int:
    vocab.kinds[token_id] |= CONTROL
    return token_id


def _spare_inner_ends(vocab: Vocabulary, ends: set[int]) -> None:
    """Remove end-of-generation tokens that some models use as separators inside answers."""
    names = {vocab.tokens[token_id] for token_id in ends}
    if names & {"<|call|>", "<|calls|>"} and names & {"<|return|>", "<|flush|>"}:
        _drop_end(vocab, ends, "<|end|>", USER_DEFINED)
    if "<|tool_response>" in names:
        _drop_end(vocab, ends, "</s>", NORMAL)


def _drop_end(vocab: Vocabulary, ends: set[int], name: str, kind: int) -> None:
    token_id = vocab.ids.get(name)
    if token_id in ends:
        ends.discard(token_id)
        vocab.kinds[token_id] = kind


MODELS = ("llama", "gpt2", "gemma4")  # supported kinds of tokenizers
NO_MODEL = ("", "none", "no_vocab")  # kinds in files without a tokenizer

NO_VOCABULARY = Sentence("This file has no vocabulary, so it can be benchmarked but cannot chat.")
MAX_NAME = 40  # maximum displayed characters of a name


def has_vocabulary(meta: Metadata) -> bool:
    """Return whether the file names a tokenizer; without one, a model can still compute logits."""
    return meta.str(KEY + "model", "") not in NO_MODEL


def tokenizer_model(meta: Metadata) -> str:
    """Return the file's kind of tokenizer.

    Raises:
        ModelFileError: it has none, or an unsupported one.
    """
    model, file = meta.str(KEY + "model", ""), file_of(meta)
    if model in NO_MODEL:
        raise ModelFileError(
            file,
            "{file} contains no tokenizer.",
            "Pick a file that was converted with its vocabulary.",
            file=file.name,
        )
    if model not in MODELS:
        raise ModelFileError(
            file,
            "{file} uses the tokenizer {name}, which is not supported yet.",
            "Supported tokenizers: {names}.",
            file=file.name, name=repr(model[:MAX_NAME]), names=", ".join(MODELS),
        )  # fmt: skip
    return model


MAX_OTHER_SIZE = 128
"""Maximum difference between the numbers of tokens, due to padding or added special tokens."""

FIRST_COMPARED = 5
"""First id whose text is compared; earlier tokens may have different names, e.g. `<unk>`."""


def check_vocabulary(draft: GGUFFile, main: GGUFFile) -> None:
    """Check that a draft model has its main model's vocabulary.

    The rule is llama.cpp's (`common/speculative.cpp`): the same kind of tokenizer, BOS and EOS,
    similar sizes, and the same text for each common id except the first few.

    Raises:
        EngineError: their vocabularies differ.
        ModelFileError: the draft model's vocabulary contradicts itself.
    """
    if not has_vocabulary(draft.meta) and not has_vocabulary(main.meta):
        return  # only sizes can be compared, and draft tokens beyond the smaller one are dropped
    difference = _difference(draft, main)
    if difference:
        raise EngineError(
            "{file} cannot be the draft model of {other}: {problem}.",
            "Choose a smaller model of the same family.",
            file=draft.path.name, other=main.path.name, problem=difference,
        )  # fmt: skip


def _difference(draft: GGUFFile, main: GGUFFile) -> Sentence | None:
    for file in (draft, main):
        if not has_vocabulary(file.meta):
            return Sentence("{file} has no vocabulary", file=file.path.name)
    kinds = [tokenizer_model(file.meta) for file in (draft, main)]
    if kinds[0] != kinds[1]:
        text = "its tokenizer is {name}, not {other}"
        return Sentence(text, name=repr(kinds[0]), other=repr(kinds[1]))
    a, b = (read_vocabulary(file.meta, kinds[0] == "llama") for file in (draft, main))
    for name, one, other in (("BOS", a.bos_id, b.bos_id), ("EOS", a.eos_id, b.eos_id)):
        if one != other:
            text = "its {name} is token {id}, not {other}"
            ids = ["none" if token is None else str(token) for token in (one, other)]
            return Sentence(text, name=name, id=ids[0], other=ids[1])
    n, n_main = len(a.tokens), len(b.tokens)
    if abs(n - n_main) > MAX_OTHER_SIZE:
        return Sentence("it has {n} tokens, not {other}", n=n, other=n_main)
    for token, (own, main_text) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if token >= FIRST_COMPARED and own != main_text:
            text = "its token {id} is {text}, not {other}"
            return Sentence(text, id=token, text=repr(own[:40]), other=repr(main_text[:40]))
    return None
