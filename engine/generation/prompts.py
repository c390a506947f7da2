"""Conversion of texts and chats to the token ids of prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.errors import ContextOverflow, ImageError, PromptError, Sentence, TemplateError
from engine.generation.image_prompts import (
    ImageReader,
    by_number,
    encoded,
    with_numbers,
    without_numbers,
)
from engine.text.chat_template import ChatTemplate, chat_template_from_metadata
from engine.text.messages import EFFORT_VARIABLE, THINKING_VARIABLES, ChatMessage, Tool
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls.turns import (
    TemplateUse,
    as_functions,
    detect,
    has_more_than_text,
    read_object,
)
from engine.text.vocabulary import NO_VOCABULARY, has_vocabulary

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.generation.image_prompts import PromptImages
    from engine.vision.images.placed import PromptImage

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "now"})


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Tools and chat template variables for a prompt."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(
        cls, thinks: bool | None, effort: str, variables: str = "", tools: Sequence[Tool] = ()
    ) -> PromptOptions:
        """Return the options for a request; see `AnswerRequest`.

        Raises:
            PromptError: the variables are not a JSON object, or would replace parts of the request.
        """
        found: dict[str, Any] = {} if thinks is None else dict.fromkeys(THINKING_VARIABLES, thinks)
        if effort:
            found[EFFORT_VARIABLE] = effort
        if variables:
            found |= read_object(variables, Sentence("The variables for the chat template"))
        if reserved := sorted(_RESERVED & found.keys()):
            raise PromptError(
                "The chat template gets {name} from the request itself.",
                "Leave it out of the variables.",
                name=reserved[0],
            )
        return cls(found, tuple(tools))


def droppable(messages: Sequence[ChatMessage], n_last: int) -> list[range]:
    """Return the message indices of each question and its answer, oldest first.

    An answer includes the results of its tool calls and the text after them. System prompts, the
    last `n_last` messages and the question that led to a pending tool call are never included.
    """
    found, index, end = list[range](), 0, _end(messages, n_last)
    while index < end:
        n = 1
        if messages[index].role != "system":
            n += index + 1 < end and messages[index + 1].role == "assistant"
            while index + n < end and messages[index + n].role == "tool":
                n += 1
                n += index + n < end and messages[index + n].role == "assistant"
            found.append(range(index, index + n))
        index += n
    return found


def _end(messages: Sequence[ChatMessage], n_last: int) -> int:
    end = len(messages) - n_last
    if all(message.role != "tool" for message in messages[max(0, end) :]):
        return end
    questions = [n for n, message in enumerate(messages[:end]) if message.role == "user"]
    return questions[-1] if questions else 0


def without(
    messages: Sequence[ChatMessage], dropped: Sequence[Collection[int]]
) -> list[ChatMessage]:
    """Return the messages except those at the dropped indices."""
    indices = {index for group in dropped for index in group}
    return [message for index, message in enumerate(messages) if index not in indices]


def with_text(message: ChatMessage, text: str) -> ChatMessage:
    """Return a message with the same role and only this text."""
    return replace(message, content=text, reasoning="", tool_calls=(), pictures=())


PLAIN_USE = TemplateUse()
"""Template use for plain-text conversations."""

NO_OPTIONS = PromptOptions()

MAX_COUNTED = 1 << 15
"""Number of tokens up to which an overlong prompt is counted exactly, if it has at most four times
as many characters; counting a very long text would take seconds."""


EncodeChat: TypeAlias = "Callable[..., list[int]]"
"""Conversation encoder: `Prompts._encode_chat` with its options."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        n_keep: number of tokens at the start that a context shift never drops.
        n_dropped: number of tokens that were dropped with the oldest messages.
        marks: lengths after which another turn's prompt may diverge.
        images: images by number, including at least those whose tokens are in `ids`.
    """

    ids: list[int]
    n_keep: int = 0
    n_dropped: int = 0
    marks: tuple[int, ...] = ()
    images: Mapping[int, PromptImage] = field(default_factory=dict)


class Prompts:
    """Builder of one model's prompts.

    Args:
        name: name of the model, for error messages.
        template: source of the chat template; "" for the file's own.

    Attributes:
        found: the file's tokenizer; None if it has no vocabulary.
        image_reader: reader of images; None if the model cannot see.
    """

    def __init__(self, file: GGUFFile, name: str, template: str = "") -> None:
        self._name = name
        self.found: Tokenizer | None = None
        self.image_reader: ImageReader | None = None
        self._template: ChatTemplate | None = None
        if has_vocabulary(file.meta):
            self.found = Tokenizer.from_metadata(file.meta)
            self._template = chat_template_from_metadata(file.meta, self.found, template)

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            PromptError: the file has none.
        """
        if self.found is None:
            raise PromptError(
                "{file} has no vocabulary, so it can neither read nor write text.",
                "Pick a file with a tokenizer.",
                file=self._name,
            )
        return self.found

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template, or a plain one if it has none.

        Raises:
            PromptError: the file has no vocabulary.
        """
        if self._template is None:
            _ = self.tokenizer
            raise AssertionError("a tokenizer always comes with a template")
        return self._template

    @cached_property
    def template_use(self) -> TemplateUse:
        """Format in which the chat template writes functions and calls, found by rendering samples.

        Raises:
            PromptError: the file has no vocabulary.
        """
        return detect(self.template)

    @cached_property
    def control_marks(self) -> dict[int, str]:
        """Texts of the control tokens that the model's output format uses as marks, by id.

        Raises:
            PromptError: the file has no vocabulary.
        """
        tokenizer, marks = self.tokenizer, self.template_use.form.marks
        controls = filter(tokenizer.is_control, range(tokenizer.n_vocab))
        spelled = {token: tokenizer.token_text(token) for token in controls}
        return {token: text for token, text in spelled.items() if text in marks}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the vocabulary and the chat template, as sentences to show the user."""
        if self.found is None:
            return (NO_VOCABULARY,)
        warnings = tuple(self.found.warnings)
        if self.template.is_fallback:
            warnings += (Sentence("This model has no chat template: plain text is used instead."),)
        return warnings

    def plain(self, prompt: str | Sequence[int], n_ctx: int | None = None) -> Prompt:
        """Return the prompt for a text, in which special tokens are recognised, or for token ids.

        Args:
            n_ctx: context size; None for a text that need not fit.

        Raises:
            ContextOverflow: the text is so long that its tokens are not counted.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, n_ctx=n_ctx)
        else:
            ids = [int(i) for i in prompt]
        return Prompt(ids, n_keep=1 if self.found and self.found.add_bos else 0)

    def fill_in(self, before: str | Sequence[int], after: str, n_ctx: int) -> Prompt:
        """Return the prompt for filling the gap between two texts, in llama.cpp's format.

        In both texts, special tokens are not recognised; `before` may also be token ids.

        Raises:
            PromptError: the vocabulary has no tokens for this, or the texts are far too long.
        """
        tokenizer = self.tokenizer
        if tokenizer.fill_in_ids is None:
            raise PromptError(
                "{file} cannot fill in text: its vocabulary has no tokens for that.",
                "Pick a model that was trained for this, such as Qwen2.5-Coder, or omit the"
                " suffix.",
                file=self._name,
            )
        first, second, middle = tokenizer.fill_in_ids
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        suffix = self.counted(after, n_ctx, add_special=False)
        prefix = before
        if isinstance(before, str):
            prefix = self.counted(before, n_ctx, add_special=False)
        ids = [*bos, first, *prefix, second, *suffix, middle]
        return Prompt(ids, n_keep=len(ids))

    def chat(
        self, turns: Sequence[ChatMessage], n_ctx: int, *, continue_last: bool, is_shortened: bool,
        begun: Sequence[int] = (), options: PromptOptions = NO_OPTIONS, is_marked: bool = False,
    ) -> Prompt:  # fmt: skip
        """Return the prompt for a conversation.

        Args:
            n_ctx: context size; 0 for a prompt that need not fit.
            continue_last: whether the last message is the assistant's and is continued.
            is_shortened: whether to drop the oldest messages, so that the prompt fits `n_ctx`
                tokens and leaves an eighth of the context for the answer; if the answer to continue
                is too long on its own, its beginning is dropped as well.
            begun: tokens of the answer to continue, which replace its text.
            is_marked: whether to find `Prompt.marks`, which takes as long as building the prompt.

        Raises:
            PromptError: there are no messages, or the template rejects them.
            ContextOverflow: the prompt does not fit and is not to be shortened, or is far too long.
        """
        _check_some(turns)
        groups = droppable(turns, 1 + continue_last)
        images = by_number(self._read_images(turns))
        encode_chat = partial(self._encode_chat, options=options)

        @cache
        def encode(n_dropped: int, most: int | None = None) -> list[int]:
            messages = without(turns, groups[:n_dropped])
            if not begun:
                return encode_chat(messages, continue_last=continue_last, n_ctx=most)
            question = [*messages[:-1], with_text(messages[-1], "")]
            return [*encode_chat(question, continue_last=True, n_ctx=most), *begun]

        @cache
        def size(n_dropped: int) -> tuple[int, bool]:
            try:
                return len(encode(n_dropped, n_ctx or None)), True
            except ContextOverflow as error:
                return error.n_tokens, error.is_counted

        def whole(n_dropped: int) -> list[int]:
            return encode(n_dropped, n_ctx or None if size(n_dropped)[1] else None)

        if not is_shortened:
            n_tokens, is_counted = size(0)
            if n_ctx and n_tokens > n_ctx:
                if continue_last:  # its beginning could also be dropped
                    raise ContextOverflow(n_tokens, n_ctx, is_counted=is_counted)
                n_kept, is_kept_counted = size(len(groups))
                is_counted = is_kept_counted if n_kept > n_ctx else is_counted
                raise ContextOverflow(n_tokens, n_ctx, n_kept, is_counted=is_counted)
            ids = whole(0)
            marks = self._marks(turns, ids, continue_last, encode_chat) if is_marked else ()
            return Prompt(ids, marks=marks, images=images)
        most = n_ctx - max(1, n_ctx // 8) - 1
        n_dropped = _first(lambda n: size(n)[0] <= most, len(groups))
        n_tokens, is_counted = size(n_dropped)
        if not is_counted and not continue_last:
            raise ContextOverflow(n_tokens, n_ctx, n_tokens, is_counted=False)
        messages, ids = without(turns, groups[:n_dropped]), whole(n_dropped)
        if continue_last and len(ids) > most:
            ids = self._without_beginning(messages, ids, most, encode_chat)
        n_system = self._n_system(messages, ids, continue_last, encode_chat)
        marks = self._marks(messages, ids, continue_last, encode_chat) if is_marked else ()
        n_dropped = len(whole(0)) - len(ids)
        return Prompt(ids, min(n_system, n_ctx // 2), n_dropped, marks, images)

    def written(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        options: PromptOptions = NO_OPTIONS, add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """Return the prompt text for a conversation; `chat` returns its tokens.

        Args:
            add_generation_prompt: whether to end with the start of the assistant's message.
            continue_last: see `chat`.

        Raises:
            PromptError: there are no messages, or the template rejects them.
        """
        _check_some(messages)
        text = self._rendered(
            messages,
            options,
            continue_last=continue_last,
            add_generation_prompt=add_generation_prompt,
        )
        reader = self.image_reader
        return text if reader is None else without_numbers(text, reader.rule)

    def count(
        self, messages: Sequence[ChatMessage] | None, draft: str, tools: Sequence[Tool] = (),
    ) -> tuple[int | None, int, int | None]:  # fmt: skip
        """Return a prompt's token counts: before the last message, in it, and never dropped.

        The first and third counts are None if only the last message is counted; the third also
        excludes that message.

        Args:
            messages: messages before the last one; None to count only the last one.
            draft: text of the last message, which is the user's; it is merged into the last of
                `messages` if that is also the user's.
            tools: functions that the prompt describes.

        Raises:
            PromptError: the template rejects these messages or functions.
        """
        tokenizer = self.tokenizer
        n_draft = len(tokenizer.encode(draft, add_special=False))
        if messages is None:
            return None, n_draft, None
        turns = list(messages)
        text = draft.strip() or "?"  # many templates reject an empty message
        last = ChatMessage("user", text)
        if turns and turns[-1].role == "user":
            last = replace(turns[-1], content=f"{turns.pop().content}\n\n{text}")
        turns.append(last)
        options = PromptOptions(tools=tuple(tools))
        n_text = len(tokenizer.encode(text, add_special=False))

        def n_before(turns: Sequence[ChatMessage]) -> int:
            n_all = len(self._encode_chat(turns, continue_last=False, options=options))
            return max(0, n_all - n_text)

        kept = without(turns, droppable(turns, 1))
        n_all = n_before(turns)
        return n_all, n_draft, n_all if len(kept) == len(turns) else n_before(kept)

    def _without_beginning(
        self, messages: Sequence[ChatMessage], ids: list[int], most: int, encode_chat: EncodeChat
    ) -> list[int]:
        """Drop the older part of the continued answer, leaving half of the room for the rest."""
        question = encode_chat([*messages[:-1], with_text(messages[-1], "")], continue_last=True)
        n_question = _n_common(question, ids)
        n_kept = (most - n_question) // 2
        return ids[:n_question] + ids[-n_kept:] if n_kept > 0 else ids

    def _encode_chat(
        self, messages: Sequence[ChatMessage], *, continue_last: bool,
        options: PromptOptions = NO_OPTIONS, n_ctx: int | None = None,
    ) -> list[int]:  # fmt: skip
        images = self._read_images(messages)
        text = self._rendered(messages, options, continue_last=continue_last)
        encode = partial(self._encode, n_ctx=n_ctx)
        return encoded(text, images, encode) if images else encode(text)

    def _read_images(self, messages: Sequence[ChatMessage]) -> PromptImages:
        if not any(message.pictures for message in messages):
            return ()
        if self.image_reader is None:
            raise ImageError(
                "{file} cannot see images: no mmproj file is loaded with it.",
                "Put the mmproj file next to the model, and load the model again.",
                file=self._name,
            )
        return self.image_reader.read(messages)

    def _rendered(
        self, messages: Sequence[ChatMessage], options: PromptOptions, *, continue_last: bool,
        add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        if any(message.pictures for message in messages):
            messages = with_numbers(messages)
        complete = messages[:-1] if continue_last else messages
        use, tools = PLAIN_USE, options.tools
        if tools or any(map(has_more_than_text, messages)):
            use = self.template_use
        turns = use.turns(complete, tools)
        text = self.template.render(
            turns,
            as_functions(tools) if tools and use.shows_tools else None,
            add_generation_prompt,
            **options.variables,
        )
        return text + use.continuation(messages[-1], text) if continue_last else text

    def counted(
        self, text: str, n_ctx: int | None, *, add_special: bool, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text, which has to fit the context if `n_ctx` is given.

        Raises:
            ContextOverflow: it is so long that its tokens are not counted.
        """
        tokenizer = self.tokenizer
        if n_ctx is None:
            return tokenizer.encode(text, add_special, parse_special)
        is_short = len(text) <= MAX_COUNTED << 2
        most = max(n_ctx, MAX_COUNTED) if is_short else n_ctx
        if (n_tokens := tokenizer.fewest(text)) <= most:
            ids = tokenizer.encode(text, add_special, parse_special, most)
            if (n_tokens := len(ids)) <= most:
                return ids
        raise ContextOverflow(n_tokens, n_ctx, is_counted=False)

    def _encode(self, text: str, is_first: bool = True, *, n_ctx: int | None = None) -> list[int]:
        """Return a prompt's token ids, with at most one BOS token and no added EOS token."""
        tokenizer = self.tokenizer
        if not is_first:
            return self.counted(text, n_ctx, add_special=False, parse_special=True)
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        has_bos = bos is not None and text.startswith(tokenizer.token_text(bos))
        ids = self.counted(text, n_ctx, add_special=not has_bos, parse_special=True)
        if tokenizer.add_eos and not has_bos and ids and ids[-1] == eos:
            ids.pop()
        return ids

    def _n_system(
        self, messages: Sequence[ChatMessage], ids: Sequence[int], continue_last: bool,
        encode_chat: EncodeChat,
    ) -> int:  # fmt: skip
        others = [with_text(m, "?") if m.role != "system" else m for m in messages]
        return _n_shared(others, ids, continue_last, encode_chat)

    def _marks(
        self, messages: Sequence[ChatMessage], ids: Sequence[int], continue_last: bool,
        encode_chat: EncodeChat,
    ) -> tuple[int, ...]:  # fmt: skip
        n_system = self._n_system(messages, ids, continue_last, encode_chat)
        questions = [n for n, message in enumerate(messages) if message.role == "user"]
        last = questions[-1] if questions else len(messages)
        others = [with_text(m, "?") if n >= last else m for n, m in enumerate(messages)]
        n_before = _n_shared(others, ids, continue_last, encode_chat)
        return tuple(sorted({n for n in (n_system, n_before) if 0 < n < len(ids)}))


def _check_some(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise PromptError("There is no message to answer.", "Write something first.")


def _n_shared(
    others: Sequence[ChatMessage], ids: Sequence[int], continue_last: bool, encode_chat: EncodeChat
) -> int:
    try:
        return _n_common(encode_chat(others, continue_last=continue_last), ids)
    except TemplateError:  # the template rejects these texts
        return 0


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _first(holds: Callable[[int], bool], last: int) -> int:
    """Return the first number from 0 for which a monotonic condition holds, or `last`."""
    if holds(0):
        return 0
    return min(last, bisect_left(range(last), True, lo=1, key=holds)) if last else 0
