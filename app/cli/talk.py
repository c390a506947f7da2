"""The subcommand `generate`, and answers in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import engine  # its image reader is imported on first use
from app.cli.arguments import add_json, add_model, add_sampling, add_server, sampling_params
from app.cli.load_options import add_load
from app.cli.loading import given_options, load, note_warnings
from app.cli.output import fallback_fields, note, write, write_json
from engine import (
    AnswerRequest,
    ChatMessage,
    ContextShifted,
    EngineError,
    Fallback,
    Finished,
    Sentence,
    TokenText,
)

if TYPE_CHECKING:
    from app.remote.client.model import RemoteModel
    from engine import Model, Usage


class Interrupt:
    """Ctrl+C handler: the first press stops the answer, the second one the program."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        return self.is_set

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.is_set = False
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


class Answer:
    """The answer to a request."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.finished: Finished | None = None
        self.fallbacks: tuple[Fallback, ...] = ()

    def document(self) -> dict[str, object]:
        """Return the JSON document for `generate --json`."""
        assert self.finished is not None, "a generation ends with Finished or an error"
        usage = self.finished.usage
        return {
            "text": self.text,
            "ids": self.ids,
            "finish_reason": self.finished.reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "drafted_tokens": usage.n_drafted,
                "accepted_tokens": usage.n_accepted,
            },
            "timings": self.finished.timings,
            "fallbacks": fallback_fields(self.fallbacks),
        }


def answer(model: Model | RemoteModel, request: AnswerRequest, *, is_silent: bool) -> Answer:
    """Run a request, streaming its text to stdout unless `is_silent`.

    Raises:
        EngineError: the prompt is invalid, or a device failed.
    """
    interrupt, result, known = Interrupt(), Answer(), model.warnings
    with interrupt.watching():
        for event in model.answer(request, interrupt):
            if isinstance(event, TokenText):
                result.text += event.text
                result.ids += event.ids
                if not is_silent:
                    write(event.text, end="")
            elif isinstance(event, ContextShifted):
                note(f"[context full: dropped the oldest {event.n_dropped} tokens]")
            elif isinstance(event, Finished):
                result.finished = event
    result.fallbacks = model.fallbacks
    note_warnings(model, known)
    return result


def add_talk_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model: a file or a server."""
    add_model(parser, is_optional=True)
    add_server(parser)


def open_talk_model(args: argparse.Namespace) -> Model | RemoteModel:
    """Load a local model, or connect to a remote one.

    Raises:
        EngineError: loading or connecting failed, or the options contradict each other.
    """
    if args.url is None:
        for name, flag in (("remote_model", "--model"), ("api_key_file", "--api-key-file")):
            if getattr(args, name):
                raise EngineError("{flag} needs a server.", "Specify one with --url.", flag=flag)
        if args.model is None:
            raise EngineError("No model was given.", "Specify a GGUF file, or a server with --url.")
        return load(args)
    if args.model is not None:
        raise EngineError(
            "Both a file and a server were given.", "Specify the server's model with --model."
        )
    for flag in given_options(args):
        raise EngineError("{flag} has no effect on a remote model.", "Omit it.", flag=flag)
    from app.remote.client.model import server_model  # imported late: it needs network modules

    return server_model(args.url, args.remote_model, args.api_key_file)


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_talk_model(parser)
    add_prompt(parser)
    parser.add_argument(
        "-n", "--n-predict", type=int, default=512, metavar="N",
        help="max tokens to generate (default: 512; -1: no limit)",
    )  # fmt: skip
    add_images(parser, "the prompt")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--raw", action="store_true", help="complete the text without the chat template"
    )
    add_load(parser)
    add_sampling(parser)
    add_json(parser)


def run_generate(args: argparse.Namespace) -> None:
    sampling = sampling_params(args, args.n_predict)
    text = prompt_of(args)
    pictures = pictures_of(args)
    if pictures and args.raw:
        raise EngineError("--image has no effect with --raw.", "Omit it.")
    with open_talk_model(args) as model:
        if args.raw or not model.info.has_chat_template:
            request = AnswerRequest(prompt=text, sampling=sampling)
        else:
            system = (ChatMessage("system", args.system),) if args.system else ()
            message = ChatMessage("user", text, pictures=pictures)
            request = AnswerRequest((*system, message), sampling=sampling)
        result = answer(model, request, is_silent=args.json)
    if args.json:
        write_json(result.document())
    else:
        write()
        note(_footer(result))


def add_images(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option `--image`; `text` names what the images precede."""
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE",
        help=f"image before {text}: PNG, JPEG, WebP, GIF or BMP; repeatable; the model needs a "
        "vision encoder; see --mmproj",
    )  # fmt: skip


def pictures_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Read the images given with `--image`; return them encoded for messages.

    Raises:
        EngineError: an image cannot be read.
    """
    return tuple(map(engine.image_base64, args.image))


def add_prompt(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; '-' reads stdin")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")


def prompt_of(args: argparse.Namespace) -> str:
    """Return the prompt that the options give.

    Raises:
        EngineError: the prompt cannot be read.
    """
    if args.file is not None:
        return read_text(args.file)
    if args.prompt == "-":
        with reading_input():
            return sys.stdin.read()
    text: str = args.prompt
    return text


@contextlib.contextmanager
def reading_input() -> Iterator[None]:
    """Turn failures to read stdin, for example from `< folder`, into `EngineError`."""
    try:
        yield
    except OSError as error:
        problem = Sentence(error.strerror or str(error))
        raise EngineError("The input cannot be read: {problem}.", problem=problem) from None


def read_text(path: str) -> str:
    """Return the contents of a UTF-8 text file.

    Raises:
        EngineError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise EngineError("{path} is not UTF-8 text.", path=path) from None
    except OSError as error:
        problem = Sentence(error.strerror or str(error))
        raise EngineError("{path} cannot be read: {problem}.", path=path, problem=problem) from None


def _footer(result: Answer) -> str:
    assert result.finished is not None, "a generation ends with Finished or an error"
    usage, timings = result.finished.usage, result.finished.timings
    return (
        f"[{usage.completion_tokens} tokens{_speed(timings.decode_per_s)} · prompt "
        f"{usage.prompt_tokens} tokens{_speed(timings.prompt_per_s)} · first token after "
        f"{timings.first_token_s:.2f} s{_drafts(usage)} · {result.finished.reason}]"
    )


def _drafts(usage: Usage) -> str:
    if not usage.n_drafted:
        return ""
    return f" · {usage.n_accepted} of {usage.n_drafted} draft tokens accepted"


def _speed(per_s: float) -> str:
    return f", {per_s:.1f} t/s" if per_s else ""
