"""The subcommand `chat`, a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import engine  # its image reader is imported on first use
from app.chat.message import split_thought
from app.cli.arguments import add_json, add_sampling, sampling_params
from app.cli.load_options import add_load
from app.cli.output import note, note_error, write, write_json
from app.cli.talk import (
    add_images,
    add_talk_model,
    answer,
    open_talk_model,
    pictures_of,
    reading_input,
)
from app.core import paths
from engine import AnswerRequest, ChatMessage, EngineError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "


class MessageEditor:
    """Line editor for messages, which may have several lines.

    Args:
        history: file for the input history; None keeps the history in memory only.
    """

    def __init__(self, history: Path | None) -> None:
        # imported late, since only terminals need it
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        # so that input appears on the terminal even if stdout is a file
        output = None if sys.stdout.isatty() else create_output(sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            PROMPT, history=_history(history), key_bindings=_bindings(),
            prompt_continuation=" " * len(PROMPT), output=output,
        )  # fmt: skip

    def read(self) -> str | None:
        """Return the next message; None after Ctrl+D."""
        while True:
            try:
                return self._session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:  # on an empty line; Ctrl+C only clears other lines
                note("Ctrl+D quits.")


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _history(path: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class OwnHistory(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                return list(super().load_history_strings())
            return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    try:
        if path is None:
            return InMemoryHistory()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return OwnHistory(str(path))


COMMANDS = {
    "/help": "shows this list",
    "/image FILE": "attaches an image to the next message, if the model supports images",
    "/new": "starts a new chat and keeps the system prompt",
    "/quit": "quits, like Ctrl+D",
}

KEYS = "Alt+Enter starts a new line. Ctrl+C stops an answer or clears the input."


def add_chat(parser: argparse.ArgumentParser) -> None:
    add_talk_model(parser)
    add_images(parser, "the first message")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "-n", "--n-predict", type=int, default=1024, metavar="N",
        help="max tokens per answer (default: 1024; -1: no limit)",
    )  # fmt: skip
    add_load(parser)
    add_sampling(parser)
    add_json(parser)


def run_chat(args: argparse.Namespace) -> None:
    sampling = sampling_params(args, args.n_predict)
    messages = [ChatMessage("system", args.system)] if args.system else []
    turns: list[dict[str, object]] = []
    pictures = pictures_of(args)  # for the next message
    with open_talk_model(args) as model:
        if not args.json:
            note("Ctrl+D quits, Ctrl+C stops an answer, /help lists the commands.")
        for text in _messages(is_silent=args.json):
            if text == "/new":
                messages, pictures = [m for m in messages if m.role == "system"], ()
                continue
            if image := re.fullmatch(r"/image\s+(.+)", text):
                pictures += _picture(image[1].strip("'\""))
                continue
            messages.append(ChatMessage("user", text, pictures=pictures))
            pictures = ()
            request = AnswerRequest(tuple(messages), sampling=sampling)
            try:
                result = answer(model, request, is_silent=args.json)
            except EngineError as error:  # ends only this turn, not the conversation
                messages.pop()
                turns.append({"prompt": text, "error": str(error)})
                note_error(error)
                continue
            messages.append(ChatMessage("assistant", split_thought(result.text).answer))
            turns.append({"prompt": text, **result.document()})
            if not args.json:
                write("\n")
    if args.json:
        write_json({"turns": turns})


def _picture(name: str) -> tuple[str, ...]:
    try:
        image = engine.image_base64(Path(name).expanduser())
    except EngineError as error:
        note_error(error)
        return ()
    note("The image will be sent with the next message.")
    return (image,)


def _messages(*, is_silent: bool) -> Iterator[str]:
    """Yield messages, "/new" and "/image FILE" from the input; handle all other commands."""
    for text in _lines(is_silent=is_silent):
        word = text.strip()
        if word == "/quit":
            return
        if word == "/help":
            note("\n".join([*(f"{name} {does}" for name, does in COMMANDS.items()), KEYS]))
        elif word == "/new" or word.startswith("/image "):
            yield word
        elif word == "/image":
            note("/image needs a file: /image FILE")
        elif re.fullmatch(r"/[a-z]+", word):
            note(f"Unknown command {word}; /help lists the commands.")
        elif word:
            yield text


def _lines(*, is_silent: bool) -> Iterator[str]:
    if sys.stdin.isatty() and not is_silent:
        editor = MessageEditor(paths.history_file())
        while (text := editor.read()) is not None:
            yield text
        return
    with reading_input():
        while line := sys.stdin.readline():
            yield line.rstrip("\n")
