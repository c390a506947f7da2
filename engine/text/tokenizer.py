"""Encodes text into token ids and decodes them, with the vocabulary of a GGUF file.

The ids match those from llama.cpp's `llama_tokenize`; the text matches that from
`llama_detokenize`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from engine.errors import InvalidGGUF, ModelFileError, Sentence
from engine.text.encoders import (
    DEFAULT,
    PRE_TOKENIZERS,
    SPACE,
    BpeEncoder,
    PreTokenizer,
    SpmEncoder,
    byte_alphabet,
)
from engine.text.vocabulary import (
    BYTE,
    CONTROL,
    KEY,
    MAX_NAME,
    NO_VOCABULARY,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    file_of,
    has_vocabulary,
    read_vocabulary,
    tokenizer_model,
)

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

SPACES = " \t\n\v\f\r"
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found in text by its spelling.

    Args:
        text: spelling of the token.
        is_hidden: whether it is parsed only if special tokens are requested.
        eats_spaces: whether following whitespace belongs to it.
        letters: distinct characters in its spelling.
    """

    text: str
    token_id: int
    is_hidden: bool
    eats_spaces: bool
    letters: frozenset[str]

    def cut(self, text: str) -> list[str | int]:
        """Replace the token's spelling in `text` by its id; drop empty pieces."""
        first, *others = text.split(self.text)
        parts: list[str | int] = [first] if first else []
        for other in others:
            rest = other.lstrip(SPACES) if self.eats_spaces else other
            parts += [self.token_id, rest] if rest else [self.token_id]
        return parts


class SpecialTokens:
    """The special tokens of a vocabulary; one with `eats_spaces` may include following whitespace.

    Longer ones are searched for first, each in the pieces left by the previous ones.
    """

    def __init__(self, tokens: list[SpecialToken]) -> None:
        self._tokens = sorted(tokens, key=lambda token: -len(token.text.encode()))
        self.eats_spaces = any(token.eats_spaces for token in tokens)

    @classmethod
    def of(cls, vocab: Vocabulary, model_name: str) -> SpecialTokens:
        """Return the special tokens of a vocabulary.

        In Phi-3 models, which are recognised by name, they include the spaces after them.
        """
        name = model_name.lower()
        is_phi3 = "phi-3" in name or "phi3" in name
        return cls(
            [
                SpecialToken(
                    text,
                    token_id,
                    is_hidden=bool(kind & (CONTROL | UNKNOWN)),
                    eats_spaces=is_phi3 and text not in PHI3_KEEPS_SPACES,
                    letters=frozenset(text),
                )
                for token_id, (text, kind) in enumerate(zip(vocab.tokens, vocab.kinds, strict=True))
                if kind & (CONTROL | UNKNOWN | USER_DEFINED)
            ]
        )

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Split text into plain text and the ids of special tokens."""
        parts: list[str | int] = [text] if text else []
        letters = set(text)
        for token in self._tokens:
            if token.is_hidden and not parse_special:
                continue
            if token.letters <= letters and token.text in text:
                parts = [
                    piece
                    for part in parts
                    for piece in ([part] if isinstance(part, int) else token.cut(part))
                ]
        return parts


class StreamDecoder:
    """Incremental decoder of token ids; a character is emitted with its last byte.

    `token_bytes` returns the bytes that a token adds; empty for a hidden token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def begun(self) -> bytes:
        """Bytes of an incomplete character."""
        return self._decoder.getstate()[0]

    @begun.setter
    def begun(self, value: bytes) -> None:
        self._decoder.setstate((value, 0))

    def feed(self, token_id: int) -> str:
        """Add a token and return the newly completed text, which may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return the bytes of an incomplete character as U+FFFD, and reset."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def find_pre_tokenizer(meta: Metadata, model: str) -> tuple[str, PreTokenizer, tuple[str, ...]]:
    """Return the name of the file's pre-tokenizer, the one to use, and warnings if they differ."""
    name = "gemma4" if model == "gemma4" else meta.str(KEY + "pre", "")
    if model == "llama" or name in PRE_TOKENIZERS:
        return name, PRE_TOKENIZERS.get(name, DEFAULT), ()
    warning = Sentence(
        "The pre-tokenizer {name} is unknown, so the default is used and answers may be worse."
        if name
        else "The file names no pre-tokenizer, so the default is used and answers may be worse.",
        name=repr(name[:MAX_NAME]),
    )
    return name, DEFAULT, (warning,)


def tokenizer_warnings(meta: Metadata) -> tuple[str, ...]:
    """Return warnings about a file's tokenizer without building it."""
    try:
        if not has_vocabulary(meta):
            return (NO_VOCABULARY,)
        return find_pre_tokenizer(meta, tokenizer_model(meta))[2]
    except ModelFileError as error:
        return (error.message,)


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_OF = {char: bytes([byte]) for char, byte in byte_alphabet().items()}
# spaces that the decoders of some vocabularies remove, in this order
TIDY = ((rb" ([?!.,])", rb"\1"), (rb" ' ", rb"'"), (rb" '(?=s|m|re|ve)", rb"'"))


class Encoder(Protocol):
    """Encoder of text without special tokens."""

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in parts, because long texts take time."""


class Tokenizer:
    """The tokenizer of one model file.

    Attributes:
        model: kind of tokenizer, such as "llama" (SPM) or "gpt2" (BPE).
        pre: name of the pre-tokenizer in the file; "" if it has none.
        eog_ids: ids of the tokens that end a generation.
        never_ids: ids of the tokens that must never be sampled.
        fill_in_ids: ids of the fill-in-the-middle tokens for prefix, suffix and middle; None if
            there are none.
        add_bos, add_eos: whether the model expects them around a text.
        warnings: possible problems with this tokenizer.
    """

    def __init__(
        self, vocab: Vocabulary, encoder: Encoder, special: SpecialTokens, *, model: str, pre: str,
        byte_level: bool, add_bos: bool, add_eos: bool, add_space_prefix: bool, clean_spaces: bool,
    ) -> None:  # fmt: skip
        self._vocab = vocab
        self._encoder = encoder
        self._special = special
        self._byte_level = byte_level
        self._add_space_prefix = add_space_prefix
        self._clean_spaces = clean_spaces
        self._pieces: dict[int, bytes] = {}
        self.model = model
        self.pre = pre
        self.n_vocab = len(vocab.tokens)
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eog_ids = vocab.eog_ids
        self.never_ids = vocab.never_ids
        roles = [vocab.fill_in.get(role) for role in ("fim_pre", "fim_suf", "fim_mid")]
        self.fill_in_ids = None if None in roles else tuple(roles)
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.warnings = tuple(vocab.warnings)

    @classmethod
    def from_metadata(cls, meta: Metadata) -> Tokenizer:
        """Build the tokenizer that a file's metadata describes.

        Raises:
            InvalidGGUF: the vocabulary contradicts itself.
            ModelFileError: there is no tokenizer, or an unsupported one.
        """
        model = tokenizer_model(meta)
        is_spm = model == "llama"
        vocab = read_vocabulary(meta, is_spm)
        name, pre, warnings = find_pre_tokenizer(meta, model)
        vocab.warnings += warnings
        encoder = (
            SpmEncoder(vocab.plain_ids(), vocab.scores, vocab.unk_id)
            if is_spm
            else _bpe_encoder(meta, vocab, pre)
        )
        return cls(
            vocab,
            encoder,
            SpecialTokens.of(vocab, meta.str("general.name", "")),
            model=model,
            pre=name,
            byte_level=pre.byte_level and not is_spm,
            add_bos=_adds(meta, vocab, "bos", is_spm or pre.add_bos, always=pre.forces_bos),
            add_eos=_adds(meta, vocab, "eos", False),
            add_space_prefix=is_spm and meta.bool(KEY + "add_space_prefix", True),
            clean_spaces=pre.clean_spaces and not is_spm,
        )

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False,
        most: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the token ids of a text.

        Args:
            add_special: whether to add BOS and EOS if the model expects them.
            parse_special: whether to parse the spelling of a control token, such as "<|im_end|>",
                as that token. Never do so with untrusted text.
            most: number of tokens after which the rest may be skipped; the result then has more
                tokens than this. None for all.
        """
        output: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            output.append(self.bos_id)
        after_special = True
        for part in self._special.split(_valid_unicode(text), parse_special):
            if isinstance(part, int):
                output.append(part)
            else:
                prefix = " " if self._add_space_prefix and after_special else ""
                for ids in self._encoder.parts(prefix + part):
                    output += ids
                    if most is not None and len(output) > most:
                        return output
            after_special = isinstance(part, int)
        if add_special and self.add_eos and self.eos_id is not None:
            output.append(self.eos_id)
        return output

    def encode_inner(self, text: str) -> list[int]:
        """Return the token ids of text inside other text: no special tokens are added or parsed."""
        return [*chain.from_iterable(self._encoder.parts(_valid_unicode(text)))]

    def fewest(self, text: str) -> int:
        """Return a lower bound on a text's number of tokens, without encoding it."""
        return -(-len(text.encode("utf-8", "replace")) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        if self._special.eats_spaces or not self._covers_bytes:
            return 0
        kinds = zip(self._vocab.tokens, self._vocab.kinds, strict=True)
        return max(
            len(text) if self._byte_level and kind == NORMAL else len(text.encode())
            for text, kind in kinds
        )

    @property
    def _covers_bytes(self) -> bool:
        ids = self._vocab.ids
        alphabet = BYTE_OF if self._byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        return all(char in ids for char in alphabet)

    def decode(
        self, ids: Iterable[int], skip_special: bool = False, *, is_tidied: bool = True
    ) -> str:
        """Return the text of `ids`, with U+FFFD for invalid bytes.

        Args:
            skip_special: whether to leave out control tokens, such as BOS.
            is_tidied: whether to remove the space in "so ?" for vocabularies with `clean_spaces`
                (Llama 3, GPT-2).
        """
        hidden = CONTROL | UNKNOWN if skip_special else 0
        pieces = [self.token_bytes(i) for i in ids if not self._vocab.kind(i) & hidden]
        if pieces and self._add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        if self._clean_spaces and is_tidied:
            for pattern, replacement in TIDY:
                text = re.sub(pattern, replacement, text)
        return text.decode("utf-8", "replace")

    def stream(
        self, skip_special: bool = True, shown: Collection[int] = frozenset()
    ) -> StreamDecoder:
        """Return an incremental decoder, which keeps all spaces.

        `skip_special` leaves out control tokens, such as BOS, except `shown`.
        """
        hidden = CONTROL | UNKNOWN if skip_special else 0

        def spelled(token: int) -> bytes:
            is_hidden = self._vocab.kind(token) & hidden and token not in shown
            return b"" if is_hidden else self.token_bytes(token)

        return StreamDecoder(spelled)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an id beyond the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """Return a token's spelling in the vocabulary."""
        return self._vocab.tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        """Return whether a token is a control token."""
        return bool(self._vocab.kind(token_id) & CONTROL)

    def is_hidden(self, token_id: int) -> bool:
        """Return whether a token is left out of displayed text, as control tokens are."""
        return bool(self._vocab.kind(token_id) & (CONTROL | UNKNOWN))

    def _spell(self, token_id: int) -> bytes:
        kind = self._vocab.kind(token_id)
        text = self._vocab.tokens[token_id] if kind else ""
        if kind & (CONTROL | UNKNOWN | USER_DEFINED):
            return text.encode()
        if kind & NORMAL:
            return _from_byte_alphabet(text) if self._byte_level else _with_spaces(text)
        if kind & BYTE and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return b""


def _bpe_encoder(meta: Metadata, vocab: Vocabulary, pre: PreTokenizer) -> BpeEncoder:
    if KEY + "merges" not in meta:
        raise InvalidGGUF(file_of(meta), "it has a BPE tokenizer without merges")
    try:
        return BpeEncoder(vocab.ids, list(meta.strs(KEY + "merges")), pre)
    except ValueError as error:
        raise InvalidGGUF(
            file_of(meta), "its merges do not match its tokens ({error})", error=str(error)
        ) from error


def _adds(
    meta: Metadata, vocab: Vocabulary, name: str, default: bool, always: bool = False
) -> bool:
    is_added = always or meta.bool(f"{KEY}add_{name}_token", default)
    if is_added and (vocab.bos_id if name == "bos" else vocab.eos_id) is None:
        vocab.warnings.append(
            Sentence("The file asks for a {name} token but has none.", name=name.upper())
        )
        return False
    return is_added


def _with_spaces(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()


def _from_byte_alphabet(text: str) -> bytes:
    """Return the bytes of a token; characters outside the alphabet (broken vocabularies) are
    kept."""
    return b"".join(BYTE_OF.get(char) or char.encode() for char in text)


def _valid_unicode(text: str) -> str:
    """Join surrogate pairs in `text` and replace lone ones; usually return `text` itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
