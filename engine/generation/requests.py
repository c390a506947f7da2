"""Requests to a loaded model, and replies to questions; see `engine.events`.

They are frozen, picklable and free of torch. A `Question` is processed between two passes, while
answers continue.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.generation.results import TokenLogprob
from engine.sampling_params import Grammar, SamplingParams
from engine.text.messages import ChatMessage, Tool

TIMED_EVERY = 16
"""Default interval, in tokens, at which a token's times are measured."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Command to answer `messages` through the chat template, or to complete `prompt` as it is.

    Attributes:
        prompt: text, in which special tokens are recognised, or token ids; None for `messages`.
        continue_last: whether the last message is the assistant's and is continued.
        begun: token ids of the unfinished answer so far, from `TokenText`, to continue exactly from
            there; if they are missing or do not match the message's text, the text is used. They
            count towards `SamplingParams.max_tokens`.
        timed_every: interval, in tokens, at which a token is timed; 0 for none.
        thinks: whether the model should think first, if its chat template supports that
            (`ModelInfo.can_think`); None for the template's default.
        effort: reasoning effort, "low", "medium" or "high", if its chat template supports that
            (`ModelInfo.has_effort`); "" for the template's default.
        variables: JSON object with further variables for the chat template; "" for none.
        tools: functions that the model may call.
        tool_choice: "none", "auto", "required" (at least one call), or "=" followed by the name of
            the function that must be called.
        parallel_tool_calls: whether an answer in parts may have several calls; otherwise it ends
            after the first. It always ends before a call that repeats an earlier one.
        in_parts: whether thinking and tool calls are reported as separate events, not as text.
        grammar: grammar or schema for the answer; None for any text.
        suffix: text after the gap that the answer to `prompt` fills in; "" for no gap.
        n_logprobs: number of likeliest tokens to report with each token's log probability; None for
            no log probabilities.
    """

    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 frozen, so one shared default is safe
    continue_last: bool = False
    begun: tuple[int, ...] = ()
    timed_every: int = TIMED_EVERY
    thinks: bool | None = None
    effort: str = ""
    variables: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    in_parts: bool = False
    grammar: Grammar | None = None
    n_logprobs: int | None = None
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Command to count the tokens of a prompt that the user is writing, without running the model.

    Attributes:
        messages: messages before the draft; None to count only the draft, which is quick.
        tools: functions that the model may call; the prompt describes them.
    """

    messages: tuple[ChatMessage, ...] | None
    draft: str = ""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensCounted:
    """Closing event of a `CountTokens`.

    Attributes:
        n_before: number of tokens in the prompt without the draft; None if only the draft was
            counted.
        n_kept: how many of these remain if all older messages are dropped; None if unknown.
    """

    n_before: int | None
    n_draft: int
    n_kept: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Command to return the tokens of a text.

    Attributes:
        add_special: whether to add BOS and EOS as the model requires.
        parse_special: whether to parse the spelling of control tokens, such as "<|im_end|>".
        has_pieces: whether to also return the bytes of each token.
    """

    text: str
    add_special: bool = False
    parse_special: bool = True
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Closing event of a `Tokenize`, with the bytes of each token in `pieces` if requested."""

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Command to return the text of tokens, with all their spaces.

    Attributes:
        skip_special: whether to omit control tokens, such as BOS.
        has_pieces: whether to also return the bytes of each token.
    """

    ids: tuple[int, ...]
    skip_special: bool = False
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Closing event of a `Detokenize`; `text` has U+FFFD for invalid bytes."""

    text: str
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ApplyTemplate:
    """Command to render the prompt of a conversation, as an `AnswerRequest` would.

    Attributes:
        add_generation_prompt: whether to end with the start of the assistant's message.
        tools, variables, continue_last, thinks, effort: see `AnswerRequest`.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    variables: str = ""
    continue_last: bool = False
    thinks: bool | None = None
    effort: str = ""
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TemplateApplied:
    """Closing event of an `ApplyTemplate`, with the prompt text.

    Attributes:
        n_tokens: number of tokens in the prompt, including BOS and the conversation's images.
    """

    prompt: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Command to compute the embedding, a vector of length 1, of each text.

    Attributes:
        inputs: token ids, or texts, to which BOS and EOS are added as the model requires.
    """

    inputs: tuple[tuple[int, ...] | str, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Closing event of an `Embed`: an F32 vector (n_embd,) per text, and their total tokens."""

    vectors: tuple[tuple[float, ...], ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Command to compute the log probability of each token of a text given its context.

    Attributes:
        text: text, tokenized like `AnswerRequest.prompt`, or token ids, used as they are.
        n_logprobs: number of likeliest tokens to return at each position, at most 20.
    """

    text: tuple[int, ...] | str
    n_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TokensScored:
    """Closing event of a `ScoreTokens`; the first token has no context and no log probability."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class CountCache:
    """Command to report the use of the KV cache, without computing anything."""


@dataclass(frozen=True, slots=True)
class CacheCounted:
    """Closing event of a `CountCache`; counts are in tokens, in whole pages.

    Attributes:
        n_used: number of tokens in pages that unfinished answers use.
        n_kept: number of tokens in pages that are kept for later prompts until evicted.
    """

    n_used: int
    n_kept: int


Question = CountTokens | Tokenize | Detokenize | ApplyTemplate | Embed | ScoreTokens | CountCache
"""Commands that a loaded model processes between two passes."""

Reply = (
    TokensCounted | Tokenized | Detokenized | TemplateApplied | Embedded | TokensScored
    | CacheCounted
)  # fmt: skip
"""Closing events of questions."""


def has_images(question: Question) -> bool:
    """Return whether a question has images to read, which may take seconds."""
    messages = question.messages if isinstance(question, CountTokens | ApplyTemplate) else None
    return any(message.pictures for message in messages or ())
