"""What a person can make Tandem do with a file: each ends in an answer or in one sentence."""

import argparse
import io
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
from PySide6.QtCore import QCoreApplication

from app.cli.facts import run_inspect
from app.devices.split.planning import find_out
from app.devices.split.session import SplitSession
from engine import EngineError, Planner, PromptError, SamplingParams, load_model, read_model_info
from engine.formats.gguf.reader import GGUFFile
from engine.generation.requests import AnswerRequest
from engine.runtime.image_encoder import ImageEncoder
from engine.text.chat_template import chat_template_from_metadata
from engine.text.messages import ChatMessage
from engine.text.tokenizer import Tokenizer
from engine.vision.encoders.base import TextModel
from engine.vision.encoders.registry import ENCODERS, declare_vision_encoder
from engine.vision.images.placed import PromptImage
from tests.helpers.fake_planner import CPU, GPUS, fake_machine
from tests.helpers.tiny_mmproj import text_of

MAX_CHARACTERS = 500
"""Largest length of a sentence."""

SAMPLES = (
    "Hello world, the split model.",
    "",
    "  two  spaces\n\n\ttab \r\n 1234567 3.14 don't",
    "Grüße, 你好世界 こんにちは \U0001f600\U0001f1e9\U0001f1ea e\u0301 \u200b\ufeff",
    "<s></s><|im_start|>user\n<|endoftext|><unk><0x41>",
    "\x00\x07\ud83d\ude00\ud800",
    "a" * 600 + " " * 300,
)
QUESTION = (ChatMessage("user", "Hello"),)
SHARES = ((1.0,), (3.0, 1.0), (1.0, 1.0), (3.0, 1.0, 2.0))
SIZES = ((40, 30), (17, 90), (64, 64))
"""Sizes of pictures."""

MAX_SEEN = 1 << 16
"""Largest number of pixels of a picture that is encoded."""

BACKENDS = ("reference", "reference", "graph", "eager")


class WrongOutcomeError(Exception):
    """Outcome that no file may have; the message says which."""


def check_sentence(text: str) -> None:
    """Check a sentence for people: one short line without characters that act.

    Raises:
        WrongOutcomeError: it is something else.
    """
    if len(text) > MAX_CHARACTERS:
        raise WrongOutcomeError(f"a sentence of {len(text)} characters: {text[:80]!r}")
    if not text.isprintable():
        raise WrongOutcomeError(f"a sentence with control characters: {text[:200]!r}")


def _check_sentences(texts: Iterable[str]) -> None:
    for text in texts:
        check_sentence(text)


def read_header(path: Path, draw: int) -> None:
    """Do what the window does first when a file is picked, and look at all metadata."""
    info = read_model_info(path)
    for text in (info.name, info.architecture, info.quant):
        if not text.isprintable() or not 0 < len(text) <= MAX_CHARACTERS:
            raise WrongOutcomeError(f"a name that cannot be shown: {text[:80]!r}")
    with GGUFFile.open(path) as file:
        for key in file.meta.keys():  # noqa: SIM118
            if not file.meta.describe(key).isprintable():
                raise WrongOutcomeError(f"a description that cannot be shown: {key[:80]!r}")
        for tensor in file.tensors.values():
            if tensor.offset + tensor.n_bytes > file.n_bytes:
                raise WrongOutcomeError("a tensor that leaves the file")


def show_plan(path: Path, draw: int) -> None:
    """Compute all that the window and `tandem inspect` show before the model is loaded."""
    options = {"json": draw % 2 == 0, "metadata": True, "tensors": True}
    with redirect_stdout(io.StringIO()):
        run_inspect(argparse.Namespace(model=str(path), **options))
    QCoreApplication.instance() or QCoreApplication([])  # timers of the session need one
    split = SplitSession(Planner, fake_machine)
    split.set_devices([*GPUS, CPU] if draw % 3 else [CPU])
    info = read_model_info(path)
    suggest = split.suggester()
    choice = suggest(info)
    split.set_model(info)
    try:
        if choice is not None:
            split.suggest(choice)
        _check_sentences(filter(None, [*split.picture().problems, split.picture().chosen_because]))
        if (question := split.fit_question()) is not None:
            find_out(question, Planner, threading.Event())
    finally:
        split.set_model(None)


def use_tokenizer(path: Path, draw: int) -> None:
    """Build the tokenizer, encode and decode texts with it, and now and then render a prompt."""
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_metadata(file.meta)
        template = chat_template_from_metadata(file.meta, tokenizer)
    _check_sentences(tokenizer.warnings)
    special = {*tokenizer.eog_ids, *tokenizer.never_ids, tokenizer.bos_id, tokenizer.eos_id}
    _check_ids(tokenizer, special - {None})
    for number, text in enumerate(SAMPLES):
        ids = tokenizer.encode(text, parse_special=bool((draw >> number) & 1))
        _check_ids(tokenizer, ids)
        tokenizer.decode(ids, skip_special=bool((draw >> number) & 2)).encode()
    stream = tokenizer.stream()
    shown = [stream.feed(token) for token in range(min(tokenizer.n_vocab, 400))]
    text = "".join([*shown, stream.flush()])
    text.encode()
    if draw % 8 == 0:  # what is long is made of the vocabulary itself
        longest = max((tokenizer.token_text(i) for i in range(tokenizer.n_vocab)), key=len)
        for long in (text * 4, longest[:2000] * 5, SAMPLES[2] * 200, " " * 5000 + "\n" * 5000):
            tokenizer.encode(long[:10_000], parse_special=True)
    if draw % 4 == 0:
        template.render([{"role": "user", "content": "Hello"}]).encode()


def _check_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    if not all(0 <= token < tokenizer.n_vocab for token in ids):
        raise WrongOutcomeError("a token beyond the vocabulary")


def load_and_ask(path: Path, draw: int) -> None:
    """Load the model on one to three ranks, ask it, split it anew, and look at its warnings."""
    shares, backend = SHARES[draw % 4], BACKENDS[draw // 4 % 4]
    mode = "layer" if draw // 16 % 4 == 0 else "tensor"
    os.environ["TANDEM_BACKEND"] = backend
    greedy, drawn = SamplingParams(max_tokens=3, temperature=0), SamplingParams(max_tokens=2)
    devices = ["cpu"] * len(shares)
    with load_model(path, devices, shares, n_ctx=48, split_mode=mode, cpu_threads=2) as model:
        _check_sentences(model.warnings)
        list(model.generate([1, 2, 3], greedy))
        with suppress(PromptError):  # no vocabulary, or a template that does not work
            if draw // 64 % 2:
                list(model.generate(SAMPLES[0], drawn))
            else:
                list(model.answer(AnswerRequest(messages=QUESTION, sampling=drawn)))
        if len(shares) > 1 and draw // 128 % 2:
            model.resplit(shares[::-1])
            list(model.generate([1, 2], greedy))


def see(path: Path, draw: int) -> None:
    """Declare what encodes pictures for a model of each family, load it, and encode a picture."""
    known = list(dict.fromkeys(text_of(projector) for projector in sorted(ENCODERS)))
    with GGUFFile.open(path) as file:
        fitting = [text for text in known if _is_for(file, text)]
        if not fitting:
            declare_vision_encoder(file, known[draw % len(known)])
    for text in fitting:
        encoder = ImageEncoder(str(path), "cpu", text, lambda: False)
        views = encoder.rule.resizing.views(*SIZES[draw % len(SIZES)])
        (wide, high), (rows, columns) = views.sizes[-1], views.grid
        width, height = wide // columns, high // rows
        if width * height > MAX_SEEN:
            continue
        pixels = np.zeros((height, width, 3), np.uint8)
        picture = PromptImage.of(pixels, (width, height), encoder.rule, encoder.hash)
        if len(encoder.encode(picture)) != picture.n:
            raise WrongOutcomeError("another number of features than of tokens")


def _is_for(file: GGUFFile, text: TextModel) -> bool:
    try:
        return declare_vision_encoder(file, text) is not None
    except EngineError:
        return False


TARGETS: dict[str, Callable[[Path, int], None]] = {
    "header": read_header,
    "plan": show_plan,
    "tokenizer": use_tokenizer,
    "load": load_and_ask,
    "tower": see,
}
"""What is done with a file, given its path and a number that chooses among ways to do it."""
