"""All errors that users may see.

`str(error)` is one sentence that says what happened and where, including needed and available
amounts; `error.hint` says what to do. Any other exception is a bug. Messages and hints are
templates with values, because f-strings cannot be translated:

    raise EngineError("{path} cannot be read: {why}.", "Check the drive.", path=path, why=why)

    EngineError
    ├─ ModelFileError(path)
    │  ├─ InvalidGGUF
    │  ├─ MissingShard(path, missing)
    │  ├─ UnsupportedArchitecture(path, name)
    │  └─ UnsupportedQuant(path, type, tensor)
    ├─ DeviceError
    │  ├─ NoDevice(device)
    │  ├─ OutOfDeviceMemory(device, needed_bytes, free_bytes)
    │  ├─ KernelError(device, why)
    │  ├─ DeviceStopped(device, why)
    │  └─ CommError(rank, device)
    │     └─ LeftAlone
    ├─ SplitError
    ├─ ModelBusy(doing)
    ├─ PromptError
    │  ├─ ContextOverflow(n_tokens, n_ctx, n_kept)
    │  ├─ TemplateError
    │  └─ ToolError(tool)
    ├─ GrammarError(place)
    ├─ StateFileError(path)
    ├─ Cancelled
    ├─ EngineMissing(module)
    └─ EngineCrashed

Errors cross threads and processes, so each can be pickled, and its attributes have the names and
types of its constructor's arguments, from which `process.codec` derives a schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Self

MIB = 1 << 20
GIB = 1 << 30

MAX_CHARACTERS = 500
"""Maximum length of a message; it may quote files and templates."""


class Sentence(str):
    """English text that remembers its template, so that the window can translate it.

    Args:
        template: text with the names of `values` in braces, optionally with a format: "{size:.1f}";
            a `Sentence` stays as it is.
        values: texts, numbers, or sentences, which are also translated.
    """

    template: str
    values: dict[str, str | int | float]

    def __new__(cls, template: str, /, **values: str | int | float) -> Self:
        if isinstance(template, cls):
            return template
        made = super().__new__(cls, template.format(**values) if values else template)
        made.template, made.values = template, values
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _sentence, (self.template, self.values)


def _sentence(template: str, values: dict[str, str | int | float]) -> Sentence:
    return Sentence(template, **values)


def either(items: Sequence[str]) -> str:
    """Return "a, b or c"."""
    *others, last = items
    return Sentence("{first} or {last}", first=", ".join(others), last=last) if others else last


def listed(items: Sequence[str]) -> str:
    """Return "a, b and c"."""
    *others, last = items
    if not others:
        return last
    first = others[0]
    for item in others[1:]:
        first = Sentence("{first}, {second}", first=first, second=item)
    return Sentence("{first} and {last}", first=first, last=last)


def paragraph(*sentences: str) -> str:
    """Join sentences into one text, leaving out empty ones."""
    text = ""
    for sentence in filter(None, sentences):
        text = Sentence("{first} {second}", first=text, second=sentence) if text else sentence
    return text


def clause(sentence: str) -> str:
    """Return a sentence without its full stop, as the end of another one."""
    if isinstance(sentence, Sentence) and sentence.template.endswith("."):
        return Sentence(sentence.template.removesuffix("."), **sentence.values)
    return sentence if isinstance(sentence, Sentence) else sentence.rstrip(".")


def reason_of(error: Exception) -> Sentence:
    """Return the reason for an error, worded as the end of a sentence."""
    return Sentence((isinstance(error, OSError) and error.strerror) or str(error))


class EngineError(Exception):
    """Base class of all errors that users may see.

    Args:
        message: template for a sentence; if longer than 500 characters, its middle is left out.
        hint: template for a sentence that says what to do about it; may be empty.
        values: values for the two templates; see `Sentence`.
    """

    def __init__(self, message: str, hint: str = "", **values: str | int | float) -> None:
        self.message: str = Sentence(message, **values)
        self.hint: str = Sentence(hint, **values)
        if len(self.message) > MAX_CHARACTERS:
            start, end = self.message[: MAX_CHARACTERS - 201], self.message[-200:]
            self.message = Sentence("{start}…{end}", start=start, end=end)
        super().__init__(self.message, self.hint)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[EngineError], args: tuple[object, ...], state: dict[str, object]
) -> EngineError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ModelFileError(EngineError):
    """Error for a file that cannot be used as a model."""

    def __init__(
        self, path: str | Path, message: str, hint: str = "", /, **values: str | int | float
    ) -> None:
        super().__init__(message, hint, **values)
        self.path = str(path)


class InvalidGGUF(ModelFileError):
    """Error for a file that is not well-formed GGUF."""

    def __init__(
        self, path: str | Path, problem: str, hint: str = "", /, **values: str | int | float
    ) -> None:
        super().__init__(
            path,
            "{file} is not a usable GGUF file: {problem}.",
            hint or "Download the file again, or pick another one.",
            file=Path(path).name,
            problem=Sentence(problem, **values),
        )


class MissingShard(ModelFileError):
    """Error for a split model with missing parts."""

    def __init__(self, path: str | Path, missing: list[str]) -> None:
        names = ", ".join(missing)
        super().__init__(
            path,
            "{file} is one part of a split model, but {names} cannot be found.",
            "Put all parts in one folder.",
            file=Path(path).name,
            names=names,
        )
        self.missing = missing


class UnsupportedArchitecture(ModelFileError):
    """Error for a model with an unsupported architecture."""

    def __init__(self, path: str | Path, name: str, supported: list[str]) -> None:
        super().__init__(
            path,
            "{file} has the architecture '{name}', which Tandem cannot run yet.",
            _nearest(name, supported),
            file=Path(path).name,
            name=name,
        )
        self.name = name


def _nearest(name: str, supported: list[str]) -> Sentence:
    similar = get_close_matches(name, supported, n=3, cutoff=0.5)
    if not similar:
        return Sentence(
            "Pick a model with one of the {n} supported architectures.", n=len(supported)
        )
    return Sentence(
        "Pick a model with one of the {n} supported architectures, for example {names}.",
        n=len(supported),
        names=either(similar),
    )


class UnsupportedQuant(ModelFileError):
    """Error for a tensor whose type cannot be dequantised."""

    def __init__(self, path: str | Path, type_name: str, tensor: str) -> None:
        super().__init__(
            path,
            "{file} stores {tensor} as {type}, which Tandem cannot read.",
            "Pick another quantisation of the model, such as Q4_K_M or Q8_0.",
            file=Path(path).name,
            tensor=tensor,
            type=type_name,
        )
        self.type_name = type_name
        self.tensor = tensor


class DeviceError(EngineError):
    """Error for a device that is missing, too small, or broken."""


class NoDevice(DeviceError):
    """Error for a requested device that does not exist on this machine or cannot be used.

    Args:
        reason: explanation, as the end of a sentence or a whole sentence.
        remedy: command that makes the device usable, if any.
    """

    def __init__(self, device: str, reason: str = "", remedy: str = "") -> None:
        message = "There is no device '{device}' on this machine."
        if reason:
            message = "There is no device '{device}' on this machine ({problem})."
        if reason.endswith("."):
            message = "There is no device '{device}' on this machine: {problem}"
        hint = "Run: {remedy}" if remedy else "`tandem devices` lists the usable devices."
        super().__init__(message, hint, device=device, problem=Sentence(reason), remedy=remedy)
        self.device = device


class OutOfDeviceMemory(DeviceError):
    """Error for an allocation that does not fit.

    Args:
        needed_bytes: requested bytes.
        free_bytes: bytes that were free at the time.
        doing: purpose, as the end of a sentence, for example "to load the model".
    """

    def __init__(self, device: str, needed_bytes: int, free_bytes: int, doing: str) -> None:
        hint = "Choose a smaller context or a smaller model, or give this device a smaller share."
        if device == "cpu" and needed_bytes <= free_bytes + 1:  # the amount is unknown
            hint = (
                "Choose a smaller context or a smaller model, or give this device a smaller share."
                " If that much is free, this program has a memory limit: raise it."
            )
        super().__init__(
            "{device} has {shortage} needed {doing}.",
            hint,
            device=device,
            shortage=_shortage(needed_bytes, free_bytes),
            doing=Sentence(doing),
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


def _shortage(needed_bytes: int, free_bytes: int) -> Sentence:
    """Describe free and needed memory in the largest unit in which the rounded values differ."""
    free, needed = free_bytes / GIB, needed_bytes / GIB
    if f"{free:.2f}" != f"{needed:.2f}":
        text = "{free:.2f} GiB free but {needed:.2f} GiB are"
        return Sentence(text, free=free, needed=needed)
    free, needed = free_bytes / MIB, needed_bytes / MIB
    if f"{free:.1f}" != f"{needed:.1f}":
        text = "{free:.1f} MiB free but {needed:.1f} MiB are"
        return Sentence(text, free=free, needed=needed)
    return Sentence("{free:.2f} GiB free but more is", free=free_bytes / GIB)


class KernelError(DeviceError):
    """Error for our own kernels on a GPU, which can still compute without them."""

    def __init__(self, device: str, why: str) -> None:
        self.device = device
        self.why = why
        super().__init__(
            "Tandem's kernels do not work on {device}: {why}.",
            "Set TANDEM_BACKEND=reference to run without them.",
            device=device,
            why=Sentence(why),
        )


class DeviceStopped(DeviceError):
    """Error for a GPU that this process can no longer use; `why` is the driver's report."""

    def __init__(self, device: str, why: str) -> None:
        self.device = device
        self.why = why
        super().__init__(
            "{device} has stopped working: {problem}.",
            "Restart Tandem to use {device} again; models still run on the CPU.",
            device=device,
            problem=Sentence(why),
        )


class CommError(DeviceError):
    """Error for a rank that left, stalled or diverged during a collective.

    Args:
        rank: rank at fault, rather than the one that noticed.
        problem: what that rank did, as the end of a sentence without its full stop.
        device: that rank's device, such as "cuda:1"; "" if unknown.
    """

    def __init__(self, rank: int, problem: str, device: str = "") -> None:
        message = "{device} (rank {rank}) {problem}." if device else "Rank {rank} {problem}."
        hint = "Load the model again."
        if device and not device.startswith("cpu"):  # a model cannot be loaded without the CPU
            hint = "Load the model again; if this comes back, load it without {device}."
        super().__init__(message, hint, device=device, rank=rank, problem=Sentence(problem))
        self.rank = rank
        self.problem = problem
        self.device = device


class LeftAlone(CommError):
    """Error for a rank that waited for a failed one; another error reports the cause."""

    def __init__(self, rank: int, device: str = "") -> None:
        super().__init__(rank, Sentence("lost the other ranks in the middle of a step"), device)


class MachineLost(DeviceError):
    """Error for a model on several machines, some of which are missing or cannot continue."""


class SplitError(EngineError):
    """Error for a split that is not possible."""


class ModelBusy(EngineError):
    """Error for a call that is nested inside another call to the same model.

    Args:
        doing: what the model is doing, for example "it is being re-split".
    """

    def __init__(self, doing: str) -> None:
        super().__init__(
            "The model is busy: {doing}.",
            "A callback cannot call the model; call it afterwards.",
            doing=Sentence(doing),
        )
        self.doing = doing


class PromptError(EngineError):
    """Error for a prompt that cannot be used."""


class ImageError(PromptError):
    """Error for an image that cannot be used, or for a model that cannot see."""


class ContextOverflow(PromptError):
    """Error for a prompt that is longer than the context.

    Client programs recognise it by the words "exceeds the available context size".

    Args:
        n_kept: number of tokens that remain if all older messages are dropped; None if unknown.
        is_counted: whether `n_tokens` is exact; otherwise it is a lower bound.
    """

    def __init__(
        self, n_tokens: int, n_ctx: int, n_kept: int | None = None, *, is_counted: bool = True
    ) -> None:
        hint = "Load the model with a larger context, or shorten the conversation."
        text = (
            "The prompt of {n} tokens exceeds the available context size of {n_ctx}."
            if is_counted
            else "The prompt of at least {n} tokens exceeds the available context size of {n_ctx}."
        )
        n = n_tokens
        if n_kept is not None and n_kept > n_ctx:
            n = n_kept
            text = (
                "Even without older messages, the prompt of {n} tokens exceeds the available"
                " context size of {n_ctx}."
                if is_counted
                else "Even without older messages, the prompt of at least {n} tokens exceeds the"
                " available context size of {n_ctx}."
            )
            hint = (
                "Shorten the last message or the system prompt, or load the model with a larger"
                " context."
            )
        super().__init__(text, hint, n=n, n_ctx=n_ctx)
        self.n_tokens, self.n_ctx, self.n_kept = n_tokens, n_ctx, n_kept
        self.is_counted = is_counted

    @property
    def is_of_last(self) -> bool:
        """Whether the last message is too long even if all older ones are dropped."""
        return self.n_kept is not None and self.n_kept > self.n_ctx


ANOTHER_TEMPLATE = (
    "Choose another chat template: in the split panel below “Requests, batch, images, RoPE,"
    " template”, or with --chat-template."
)
"""Hint for errors in a chat template."""


class TemplateError(PromptError):
    """Error for a chat template that is broken or rejects the conversation."""


class ToolError(PromptError):
    """Error for a function, `tool`, whose calls cannot be constrained."""

    def __init__(
        self, message: str, tool: str, hint: str = "", **values: str | int | float
    ) -> None:
        super().__init__(message, hint, tool=tool, **values)
        self.tool = tool


class GrammarError(EngineError):
    """Error for a grammar or JSON schema that cannot be used.

    Args:
        place: position of the error, as a JSON pointer or a line and column; "" if unknown.
    """

    def __init__(
        self, message: str, place: str = "", hint: str = "", **values: str | int | float
    ) -> None:
        hint = hint or "Correct it, or turn structured output off."
        super().__init__(message, hint, place=place, **values)
        self.place = place


class StateFileError(EngineError):
    """Error for a conversation state that cannot be saved or restored."""

    def __init__(
        self, path: str | Path, message: str, hint: str = "", /, **values: str | int | float
    ) -> None:
        super().__init__(message, hint, **values)
        self.path = str(path)


class Cancelled(EngineError):
    """Error for work that the user cancelled, which is not a failure."""

    def __init__(self, what: str = Sentence("The work")) -> None:
        super().__init__("{what} was cancelled.", what=Sentence(what))


class EngineMissing(EngineError):
    """Error for a missing library, such as "torch", which comes with an engine pack."""

    def __init__(self, module: str) -> None:
        super().__init__(
            "The engine is not installed: {module} is missing.",
            "Run: tandem engine install",
            module=module,
        )
        self.module = module


class EngineCrashed(EngineError):
    """Error for an engine that stopped because of a bug; `hint` has the end of its log."""
