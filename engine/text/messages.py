"""The turns of a conversation, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

IMAGE_PLACEHOLDER = "\ufffc"
"""Character that stands for a picture in the text of a message that has some."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant asks for.

    Attributes:
        arguments: text of a JSON object.
        id: name of the call, by which its result refers to it.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        description: what it does, for the model.
        parameters: JSON schema of its arguments, as text; "" for none.
    """

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture in a file of this machine, which is read when it is needed.

    Attributes:
        path: path of the file, whose content does not change.
    """

    path: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user", "assistant" or "tool".

    Attributes:
        reasoning: what the assistant has thought before its answer, without marks; templates get
            it as `reasoning_content`.
        tool_calls: calls that the assistant asks for behind its text.
        tool_call_id: name of the call whose result a "tool" message is.
        name: name of the function whose result it is, where it is known.
        pictures: pictures, or the bytes of their files as base64, see
            `images.reading.image_base64`. Each `IMAGE_PLACEHOLDER` in the text stands for the
            next one; those that are left come first.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[ImageFile | str, ...] = ()


def text_size(value: object) -> int:
    """Return the number of characters of all texts in a command, or in a part of one.

    Each item of a list counts as one as well, since many small texts take time, too.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.keys())) + sum(map(text_size, value.values()))
    if isinstance(value, tuple | list):
        return len(value) + sum(map(text_size, value))
    if is_dataclass(value):
        return sum(text_size(getattr(value, one.name)) for one in fields(value))
    return 0
