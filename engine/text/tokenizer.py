"""Encodes text to token ids and decodes them, with the vocabulary of a GGUF file.

The ids are those of llama.cpp's `llama_tokenize`, the text that of its `llama_detokenize`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from engine.errors import InvalidGGUF
from engine.text.bpe import BpeEncoder, byte_alphabet
from engine.text.pretokenizers import PreTokenizer
from engine.text.special import SpecialTokens
from engine.text.spm import SPACE, SpmEncoder
from engine.text.stream import StreamDecoder
from engine.text.support import find_pre_tokenizer, tokenizer_model
from engine.text.vocabulary import (
    BYTE,
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    file_of,
    read_vocabulary,
)

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_OF = {char: bytes([byte]) for char, byte in byte_alphabet().items()}
# spaces that some vocabularies' decoders remove, in this order
TIDY = ((rb" ([?!.,])", rb"\1"), (rb" ' ", rb"'"), (rb" '(?=s|m|re|ve)", rb"'"))


class Encoder(Protocol):
    """Encoder of text without special tokens."""

    def parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of a text in parts, as each takes a moment."""
        ...


class Tokenizer:
    """The tokenizer of one model file.

    Attributes:
        model: kind of tokenizer, such as "llama" (SPM) or "gpt2" (BPE).
        pre: name of the pre-tokenizer in the file; "" where it has none.
        n_vocab: number of tokens.
        bos_id, eos_id: ids of BOS and EOS; None where there is none.
        eog_ids: ids of the tokens that end a generation.
        never_ids: ids of the tokens that the model must not answer with.
        fill_in_ids: ids of the tokens before the text in front of a gap, before the text behind it,
            and before what fills it; None without such tokens.
        add_bos, add_eos: whether the model wants them around a text.
        warnings: sentences on what may be wrong with this tokenizer.
    """

    def __init__(
        self,
        vocab: Vocabulary,
        encoder: Encoder,
        special: SpecialTokens,
        *,
        model: str,
        pre: str,
        byte_level: bool,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool,
        clean_spaces: bool,
    ) -> None:
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
        self.fill_in_ids = _fill_in_ids(vocab)
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.warnings = tuple(vocab.warnings)

    @classmethod
    def from_metadata(cls, meta: Metadata) -> Tokenizer:
        """Build the tokenizer that a file's metadata describes.

        Raises:
            InvalidGGUF: the vocabulary contradicts itself.
            ModelFileError: there is no tokenizer, or one of an unsupported kind.
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
            add_special: whether to add BOS and EOS where the model wants them.
            parse_special: whether to read the spelling of a control token, such as "<|im_end|>",
                as that token. Never do so with untrusted text.
            most: number of tokens that are enough: of a text with more, only the first are
                returned, but more than these; None for all.
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
        """Return the token ids of text in the middle of another: nothing is added or special."""
        return [*chain.from_iterable(self._encoder.parts(_valid_unicode(text)))]

    def fewest(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it."""
        return -(-len(text.encode("utf-8", "replace")) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """Largest number of bytes of a text that one token stands for; 0 if there is no limit."""
        if self._special.eats_spaces or not self._covers_bytes:
            return 0
        kinds = zip(self._vocab.tokens, self._vocab.kinds, strict=True)
        return max(
            len(text) if self._byte_level and kind == NORMAL else len(text.encode())
            for text, kind in kinds
        )

    @property
    def _covers_bytes(self) -> bool:
        """Whether each byte is a token, so that no character is left out of a text."""
        ids = self._vocab.ids
        alphabet = BYTE_OF if self._byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        return all(char in ids for char in alphabet)

    def decode(
        self, ids: Iterable[int], skip_special: bool = False, *, is_tidied: bool = True
    ) -> str:
        """Return the text of `ids`, with U+FFFD for invalid bytes.


        Args:
            skip_special: whether to leave out control tokens, such as BOS.
            is_tidied: whether vocabularies whose decoder tidies spaces (Llama 3, GPT-2) lose the
                space in "so ?".
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
        """Return a decoder for tokens as they are generated, which keeps all spaces.

        Args:
            skip_special: whether to leave out control tokens, such as BOS, but for `shown`.
        """
        hidden = CONTROL | UNKNOWN if skip_special else 0

        def spelled(token: int) -> bytes:
            is_hidden = self._vocab.kind(token) & hidden and token not in shown
            return b"" if is_hidden else self.token_bytes(token)

        return StreamDecoder(spelled)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for an id beyond the vocabulary."""
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
        """Return whether a token is left out of text that is shown, as control tokens are."""
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
        raise InvalidGGUF(file_of(meta), f"its merges do not fit its tokens ({error})") from error


def _adds(
    meta: Metadata, vocab: Vocabulary, name: str, default: bool, always: bool = False
) -> bool:
    """Return whether BOS or EOS is added to texts."""
    wanted = always or meta.bool(f"{KEY}add_{name}_token", default)
    if wanted and (vocab.bos_id if name == "bos" else vocab.eos_id) is None:
        vocab.warnings.append(f"The file asks for a {name.upper()} token but has none.")
        return False
    return wanted


def _fill_in_ids(vocab: Vocabulary) -> tuple[int, int, int] | None:
    found = vocab.fill_in
    if not {"fim_pre", "fim_suf", "fim_mid"} <= found.keys():
        return None
    return found["fim_pre"], found["fim_suf"], found["fim_mid"]


def _with_spaces(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()


def _from_byte_alphabet(text: str) -> bytes:
    """Return the bytes of a token; characters outside the alphabet stand for themselves.

    Broken vocabularies have such characters.
    """
    return b"".join(BYTE_OF.get(char) or char.encode() for char in text)


def _valid_unicode(text: str) -> str:
    """Join surrogate pairs in `text` and replace lone ones; usually return `text` itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
