"""Questions about a loaded model's text: its tokens, and the prompts of its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import PromptError
from engine.generation.wishes import PromptOptions
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.generation.image_prompts import Seen
    from engine.generation.prompts import Prompts
    from engine.generation.stream import Occupancy
    from engine.model.architectures.info import ModelInfo
    from engine.text.chat_template import ChatTemplate
    from engine.text.messages import ChatMessage, Tool
    from engine.text.tokenizer import Tokenizer
    from engine.vision.images.placed import VisionInfo


class TextInquiries:
    """The part of `engine.api.Model` that answers questions without computing tokens.

    Any thread may ask, also while others compute: all that it uses is text.
    """

    info: ModelInfo
    _prompts: Prompts
    _occupancy: Occupancy

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            PromptError: the file has none.
        """
        return self._prompts.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or a plain one if it has none.

        Raises:
            PromptError: the file has no vocabulary.
        """
        return self._prompts.template

    @property
    def sight(self) -> VisionInfo | None:
        """Sizes by which the model sees pictures; None if it sees none."""
        reader = self._prompts.pictures
        return None if reader is None else reader.sight

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: whether to add BOS and EOS where the model wants them.
            parse_special: whether to read the spelling of a control token, such as "<|im_end|>",
                as that token.

        Raises:
            PromptError: the model has no vocabulary.
        """
        self._occupancy.check_open()
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens, with all their spaces, and U+FFFD for invalid bytes.

        Args:
            skip_special: whether to leave out control tokens, such as BOS.

        Raises:
            PromptError: the model has no vocabulary, or no such tokens.
        """
        self._occupancy.check_open()
        return self.tokenizer.decode(self._known(ids), skip_special, is_tidied=False)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds to a text.

        Raises:
            PromptError: the model has no vocabulary, or no such tokens.
        """
        self._occupancy.check_open()
        return [self.tokenizer.token_bytes(token) for token in self._known(ids)]

    def apply_template(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        thinks: bool | None = None, effort: str = "", variables: str = "",
        tools: Sequence[Tool] = (), add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """Return the text of a conversation's prompt; see `engine.events.Generate`.

        Args:
            add_generation_prompt: whether to end where the assistant begins to speak.

        Raises:
            PromptError: the model has no vocabulary, there are no messages, or its template does
                not take them.
        """
        self._occupancy.check_open()
        return self._prompts.written(
            messages,
            continue_last=continue_last,
            wishes=PromptOptions.of(thinks, effort, variables, tools),
            add_generation_prompt=add_generation_prompt,
        )

    def chat_size(
        self, messages: Sequence[ChatMessage], *, continue_last: bool = False,
        thinks: bool | None = None, effort: str = "", variables: str = "",
        tools: Sequence[Tool] = (), is_cancelled: IsCancelled = never,
    ) -> int:  # fmt: skip
        """Return the number of tokens of a conversation's prompt, those of pictures among them.

        Args:
            is_cancelled: asked while pictures are read, on any thread; returning True ends that.

        Raises:
            PromptError: see `apply_template`.
            ImageError: the model cannot see, or a picture cannot be used.
        """
        self._occupancy.check_open()
        _ = self._read_pictures(messages, is_cancelled)  # held meanwhile
        wishes = PromptOptions.of(thinks, effort, variables, tools)
        prompt = self._prompts.chat(
            messages, 0, continue_last=continue_last, is_shortened=False, wishes=wishes
        )
        return len(prompt.ids)

    def prompt_size(self, prompt: str) -> int:
        """Return the number of tokens of a prompt from `apply_template`."""
        return len(self.prompt_ids(prompt))

    def prompt_ids(self, prompt: str | Sequence[int], n_ctx: int | None = None) -> list[int]:
        """Return the tokens that `Model.generate` goes on with.

        Args:
            n_ctx: size of the context; None for a prompt that need not fit.

        Raises:
            PromptError: the model has no vocabulary for a text, or it is far too long.
        """
        return self._prompts.plain(prompt, n_ctx).ids

    def count_tokens(
        self, messages: Sequence[ChatMessage] | None, draft: str = "", tools: Sequence[Tool] = (),
        is_cancelled: IsCancelled = never,
    ) -> tuple[int | None, int, int | None]:  # fmt: skip
        """Return the tokens of a chat's next prompt, see `TokensCounted`.

        Args:
            messages: messages before the last one; None to count that alone, which is quick.
            draft: text of the last message.
            tools: functions that the prompt describes.
            is_cancelled: see `chat_size`.

        Raises:
            PromptError: the model has no vocabulary, or its template refuses these messages.
        """
        self._occupancy.check_open()
        _ = self._read_pictures(messages or (), is_cancelled)  # held meanwhile
        return self._prompts.count(messages, draft, tools)

    def _read_pictures(self, messages: Sequence[ChatMessage], is_cancelled: IsCancelled) -> Seen:
        """Read the pictures of a conversation before the model is used, which may take seconds."""
        reader = self._prompts.pictures
        return reader.read(messages, is_cancelled) if reader else ()

    def _known(self, ids: Sequence[int]) -> Sequence[int]:
        """Return token ids that the model has.

        Raises:
            PromptError: it has not all of them.
        """
        n_vocab = max(self.info.n_vocab, self.tokenizer.n_vocab)
        if not all(0 <= token < n_vocab for token in ids):
            raise PromptError(
                f"There are token ids outside 0 to {n_vocab - 1}.", "Use ids of this model."
            )
        return ids
