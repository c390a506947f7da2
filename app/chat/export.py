"""Conversion of chats to Markdown, HTML and JSON for other programs, and back from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat.chat_file import salvaged
from app.chat.conversation import Conversation, NewerChat
from app.chat.images.album import (
    NAME,
    PathOf,
    image_files,
    in_html,
    in_markdown,
    nowhere,
    take_files,
)
from app.chat.markdown import formula_rules
from app.chat.message import Message, split_thought
from app.chat.tool_use import ToolUse, with_stopped
from app.core.paths import is_device_name
from app.core.translation import reason_of, tr, tr_later
from engine import one_line, printable, read_file

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

    from app.chat.images.files import ImageFolder

PDF = ".pdf"

FORMATS = {
    ".md": "Markdown (*.md)",
    ".html": tr_later("Web page (*.html)"),
    PDF: "PDF (*.pdf)",
    ".json": "JSON (*.json)",
}
"""Export formats: names in the file dialog, by suffix."""

UNREADABLE = tr_later("{name} cannot be read: {why}.")

MAX_BYTES = 256 << 20
SPEAKERS = {"user": tr_later("You"), "assistant": tr_later("Answer")}

STYLE = (
    "body{max-width:46em;margin:2em auto;padding:0 1em;font:16px/1.5 system-ui,sans-serif}"
    "pre{background:#f2f2f4;padding:1em;border-radius:8px;overflow-x:auto}"
    "h2.speaker{font-size:1em;margin-top:2em;color:#667}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2em .6em}img{max-width:100%;max-height:30em}"
)


class NotAChat(ValueError):
    """A file is not a chat; the message says why."""


def exported(chat: Conversation, suffix: str, path_of: PathOf = nowhere, beside: str = "") -> str:
    """Return a chat as text in a file format.

    Args:
        suffix: one of `FORMATS`, except `PDF`.
        path_of: returns the paths of the chat's images.
        beside: name of the image folder next to a Markdown file; "" if there is none.

    Raises:
        OSError: an image cannot be read.
    """
    if suffix == ".json":
        shared = {**chat.to_json(), "draft_files": []}  # omit this machine's paths
        if files := image_files(chat, path_of):
            shared[NAME] = files
        return json.dumps(shared, ensure_ascii=False, indent=1)
    return _web_page(chat, path_of) if suffix == ".html" else _markdown(chat, beside)


def file_name(chat: Conversation) -> str:
    """Return a file name from a chat's title, without a suffix."""
    kept = (c if c.isalnum() or c in " -_.," else " " for c in printable(chat.shown_title))
    name = " ".join("".join(kept).split()).strip(". ")[:80] or tr("Chat")
    return f"_{name}"[:80] if is_device_name(name) else name


def with_suffix(path: Path, kind: str) -> Path:
    """Return a path with a suffix from `FORMATS`: its own, or that of the chosen file type `kind`.

    The proposed ".md" is replaced, because not all dialogs change it with the file type.
    """
    own, chosen = path.suffix.lower(), [end for end, name in FORMATS.items() if tr(name) == kind]
    if own == ".md" and chosen:
        return path if chosen == [own] else path.with_suffix(chosen[0])
    return path if own in FORMATS else path.with_name(path.name + (*chosen, ".md")[0])


def imported(path: Path, folder: ImageFolder | None = None) -> Conversation:
    """Return the chat in a JSON file, with a new id; for a damaged file, its intact messages.

    Args:
        folder: where to store its images; None to omit them.

    Raises:
        NotAChat: it is not a chat, or cannot be read.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NotAChat(tr("{name} is too large to be a chat.").format(name=path.name))
        data = read_file(path, MAX_BYTES)
        try:
            values = json.loads(data.decode())
            files = values.pop(NAME, None)
            chat = Conversation.from_json(values)
        except NewerChat:
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            chat, files = salvaged(data.decode(errors="replace")), None
            chat.title = tr("{title} (recovered)").format(title=chat.shown_title)
        chat.renew_id()
        chat.origin = ""  # the id in the file may belong to an unrelated chat
        if folder is not None:
            take_files(chat, files, folder)
    except OSError as error:
        why = reason_of(error)
        raise NotAChat(tr(UNREADABLE).format(name=path.name, why=why)) from None
    except NotAChat:
        raise
    except NewerChat as error:
        raise NotAChat(tr(UNREADABLE).format(name=path.name, why=error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise NotAChat(
            tr("{name} is not a chat exported by Tandem.").format(name=path.name)
        ) from None
    for message in chat.tree:  # do not trust the file's information about tools
        message.calls = with_stopped(message.calls, "waiting")
    return chat


def _markdown(chat: Conversation, beside: str) -> str:
    parts = [f"# {' '.join(chat.shown_title.split())}"]
    if chat.system_prompt.strip():
        quoted = "\n".join(f"> {line}" for line in chat.system_prompt.strip().splitlines())
        parts.append(f"**{tr('System prompt')}**\n\n{quoted}")
    for message, speaker in spoken(chat):
        parts += [f"## {speaker}"] if speaker else []
        parts += [in_markdown(image, beside) for image in message.pictures]
        parts.append(said(message))
    return "\n\n".join(parts) + "\n"


def _web_body(chat: Conversation, path_of: PathOf) -> str:
    render = web_parser()
    parts = [f"<h1>{_title(chat)}</h1>"]
    if chat.system_prompt.strip():
        parts.append(f"{_headed(tr('System prompt'))}\n<p>{escape(chat.system_prompt.strip())}</p>")
    for message, speaker in spoken(chat):
        text = said(message)
        heading = _headed(speaker) if speaker else ""
        body = render.render(text) if message.role == "assistant" else _paragraphs(text)
        shown = "".join(in_html(image, path_of) for image in message.pictures)
        parts.append(f"{heading}\n{shown}{body}")
    return "\n".join(parts)


def _web_page(chat: Conversation, path_of: PathOf) -> str:
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{_title(chat)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"{_web_body(chat, path_of)}\n</body></html>\n"
    )


@cache
def web_parser() -> MarkdownIt:
    """Return a Markdown parser that renders HTML but keeps formulas as source."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.footnote import footnote_plugin

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.use(footnote_plugin, inline=False).use(formula_rules)
    parser.add_render_rule("formula", _formula_as_text)
    parser.add_render_rule("formula_block", _formula_as_text)
    return parser


def _formula_as_text(
    renderer: object, tokens: Sequence[Token], at: int, options: object, env: object
) -> str:
    tag = "p" if tokens[at].type == "formula_block" else "span"
    return f'<{tag} class="formula">{escape(tokens[at].content)}</{tag}>'


def _headed(speaker: str) -> str:
    return f'<h2 class="speaker">{escape(speaker)}</h2>'


def _title(chat: Conversation) -> str:
    return escape(" ".join(chat.shown_title.split()))


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{escape(part).replace(chr(10), '<br>')}</p>" for part in text.split("\n\n"))


def said(message: Message) -> str:
    """Return a message as Markdown: its text, file names and calls, but no thought."""
    if message.is_answer:
        text = split_thought(message.content).answer.strip()
        return "\n\n".join(filter(None, [text, *map(_call_text, message.calls)]))
    names = [f"[{one_line(file.name)}]" for file in message.attachments]
    return "\n\n".join(filter(None, [" ".join(names), message.content.strip()]))


def spoken(chat: Conversation) -> Iterator[tuple[Message, str]]:
    """Yield the messages on screen and their speakers ("" if an answer continues after calls)."""
    before: Message | None = None
    for message in chat.messages:
        goes_on = before is not None and before.calls and message.is_answer
        yield message, "" if goes_on else tr(SPEAKERS.get(message.role, message.role))
        before = message


def _call_text(call: ToolUse) -> str:
    title = one_line(" · ".join(filter(None, (call.title or call.name, call.server))))
    parts = [tr("Tool: {title}").format(title="`" + title.replace("`", "'") + "`")]
    parts += [tr("Arguments"), _fenced(call.arguments)] if call.arguments else []
    parts += [tr("Result"), _fenced(call.result)] if call.result else []
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable(text)}\n{fence}"
