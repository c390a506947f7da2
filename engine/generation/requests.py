"""Requests to a loaded model, and the replies to those that are no answers; see `engine.events`.

They are frozen, picklable and free of torch. A `Question` is answered between two passes; other
answers go on behind it.
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
        begun: ids of the tokens that the answer to continue has had so far, from `TokenText`, so
            that it goes on from exactly these; its text counts where they do not spell it, or
            there are none. `SamplingParams.max_tokens` counts them.
        timed_every: interval, in tokens, at which a token's times are measured; 0 for none.
        thinks: whether the model shall think before it answers, where its chat template can say so
            (`ModelInfo.can_think`); None as the template has it.
        effort: how much it shall think, "low", "medium" or "high", where its chat template can say
            so (`ModelInfo.has_effort`); "" as the template has it.
        variables: text of a JSON object with more variables for the chat template; "" for none.
        tools: functions that the model may call.
        tool_choice: "none", "auto", "required" (at least one call), or the name of the function
            that it must call, with "=" before it.
        parallel_tool_calls: whether an answer in parts may have several calls; otherwise it ends
            behind the first. It always ends at a call that repeats an earlier one of the answer,
            which is left out.
        in_parts: whether thinking and calls of functions come as such, and not as text.
        grammar: the form that the answer must have; None for any.
        suffix: text behind the gap that the answer to `prompt` fills in; "" for no gap.
        n_logprobs: number of likeliest tokens of which each token tells the probability, beside its
            own; None to tell none at all.
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
    """Command to count the tokens of a prompt that is being written; nothing is computed.

    Attributes:
        messages: messages before the draft; None to count the draft alone, which is quick.
        draft: text of the next message.
        tools: functions that the model may call, which its prompt describes.
    """

    messages: tuple[ChatMessage, ...] | None
    draft: str = ""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensCounted:
    """Closing event of a `CountTokens`.

    Attributes:
        n_before: number of tokens of a prompt without the draft: of the messages, and of what the
            chat template adds; None if only the draft was counted.
        n_draft: number of tokens of the draft.
        n_kept: those of `n_before` that stay once all older messages are dropped; None if unknown.
    """

    n_before: int | None
    n_draft: int
    n_kept: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Command to return the tokens of a text.

    Attributes:
        add_special: whether to add BOS and EOS where the model wants them.
        parse_special: whether to read the spelling of a control token, such as "<|im_end|>", as
            that token.
        has_pieces: whether the bytes of each token are wanted, too.
    """

    text: str
    add_special: bool = False
    parse_special: bool = True
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Closing event of a `Tokenize`.

    Attributes:
        ids: ids of the tokens.
        pieces: bytes that each token adds to a text, if they were wanted; a token may be a part of
            a character.
    """

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Command to return the text of tokens, with all their spaces.

    Attributes:
        skip_special: whether to leave out control tokens, such as BOS.
        has_pieces: whether the bytes of each token are wanted, too.
    """

    ids: tuple[int, ...]
    skip_special: bool = False
    has_pieces: bool = False


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Closing event of a `Detokenize`.

    Attributes:
        text: text of all tokens, with U+FFFD for bytes that are no characters.
        pieces: see `Tokenized`.
    """

    text: str
    pieces: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ApplyTemplate:
    """Command to write the prompt of a conversation, as an `AnswerRequest` would.

    Attributes:
        add_generation_prompt: whether to end where the assistant begins to speak.
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
    """Closing event of an `ApplyTemplate`, with the text of the prompt.

    Attributes:
        n_tokens: number of its tokens, with what the model wants before a text, and with those of
            the conversation's images.
    """

    prompt: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Command to compute the embeddings of texts: a vector of length 1 for each.

    Attributes:
        inputs: texts, which get the BOS and EOS that the model wants, or token ids, which are taken
            as they are.
    """

    inputs: tuple[tuple[int, ...] | str, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Closing event of an `Embed`.

    Attributes:
        vectors: embedding of each text: `n_embd` numbers in F32.
        n_tokens: number of tokens of all texts.
    """

    vectors: tuple[tuple[float, ...], ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Command to tell how likely each token of a text is behind those before it.

    Attributes:
        text: text, tokenized like `AnswerRequest.prompt`, or token ids, used as they are.
        n_logprobs: number of likeliest tokens to name at each place, 20 at most.
    """

    text: tuple[int, ...] | str
    n_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TokensScored:
    """Closing event of a `ScoreTokens`.

    Attributes:
        ids: ids of the text's tokens.
        logprobs: how likely each token but the first was, which has nothing before it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class CountCache:
    """Command to tell how full the KV cache is; nothing is computed."""


@dataclass(frozen=True, slots=True)
class CacheCounted:
    """Closing event of a `CountCache`, in tokens, of which whole pages are counted.

    Attributes:
        n_used: number of tokens in pages of answers under way.
        n_kept: number of tokens in pages that are kept for later prompts, and make room for
            answers where that is wanted.
    """

    n_used: int
    n_kept: int


Question = CountTokens | Tokenize | Detokenize | ApplyTemplate | Embed | ScoreTokens | CountCache
"""Commands that a loaded model answers between two passes."""

Reply = (
    TokensCounted | Tokenized | Detokenized | TemplateApplied | Embedded | TokensScored
    | CacheCounted
)  # fmt: skip
"""Closing events of questions."""


def has_pictures(question: Question) -> bool:
    """Return whether images are read for the reply to a question, which may take seconds."""
    messages = question.messages if isinstance(question, CountTokens | ApplyTemplate) else None
    return any(message.pictures for message in messages or ())
