"""The engine's commonest sentences in the window's language; the others stay English.

The engine is a library and a command line, too, and its sentences are English and made where the
fact is known. So the window knows their forms: what fits one is taken apart and put together in
the catalogue's words. `tests/app/test_engine_sentences.py` makes each of them with the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from app.translation import ENGLISH, language, tr, tr_later
from app.units import decimal

FORMS: Final = (
    tr_later("Limited by memory bandwidth: reading takes {part} of the time."),
    tr_later("Limited by compute: multiplying takes {part} of the time."),
    tr_later("Limited by the overhead of operations, which takes {part} of the time."),
    tr_later("Limited by the links: exchanges between devices take {part} of the time."),
    tr_later("Limited by the work between tokens, such as sampling: {part} of the time."),
    tr_later("{device} is slower; the other waits for it {part} of the time."),
    tr_later("{device} is slowest; the others wait for it {part} of the time."),
    tr_later("The CPU alone, as there is no GPU."),
    tr_later("{device} is the only GPU, and holds the model."),
    tr_later("{device} alone: {rate} tok/s. No split over several GPUs fits."),
    tr_later(
        "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts); nothing else could be"
        " run."
    ),
    tr_later(
        "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts), more than any other"
        " device."
    ),
    tr_later(
        "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts), the best split, over"
        " {others}, gives {other_rate} tok/s ({other_prompts} tok/s for prompts)."
    ),
    tr_later(
        "{devices} alone gives {rate} tok/s ({prompts} tok/s for prompts), the best split, over"
        " {others}, gives {other_rate} tok/s ({other_prompts} tok/s for prompts): no real"
        " difference, so the fewer devices are used."
    ),
    tr_later(
        "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for prompts);"
        " no device holds the model alone."
    ),
    tr_later(
        "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for prompts),"
        " the next best split {other_rate} tok/s ({other_prompts} tok/s for prompts); no device"
        " holds the model alone."
    ),
    tr_later(
        "Splitting over {devices} at {shares} gives {rate} tok/s ({prompts} tok/s for prompts);"
        " {others} alone gives {other_rate} tok/s ({other_prompts} tok/s for prompts)."
    ),
    tr_later(
        "Together they need {part} of its time, because each reads and computes only its part."
    ),
    tr_later("There {devices} waits for others {part} of the time."),
    tr_later("No split could be run: the devices have too little memory for this context."),
    tr_later(
        "Only splits that were measured in turns at the end are compared: speeds of one run vary"
        " with what else the machine does."
    ),
    tr_later(
        "Other programs used {devices} when the search began, so these speeds may be lower than"
        " they could be."
    ),
    tr_later("Guessed tokens pay here."),
    tr_later("Guessed tokens do not pay here."),
    tr_later(
        "With those {way}, new text is {prose} times as fast and repeated text {quoting} times."
    ),
    tr_later("The best are those {way}."),
    tr_later("Do not split over this link; run a copy on each machine that holds the model."),
    tr_later("Machine {n} alone: {rate} tok/s."),
    tr_later("Both machines together: {rate} tok/s; links take {part} of the time."),
    tr_later("All {n} machines together: {rate} tok/s; links take {part} of the time."),
    tr_later("No machine holds the model alone."),
    tr_later("No device has room for the model with this context."),
    tr_later("There is no file {path}."),
    tr_later("It may have been moved or deleted."),
    tr_later("{file} is not a usable GGUF file: it does not begin with 'GGUF'."),
    tr_later("{file} is not a usable GGUF file: {problem}."),
    tr_later("Download the file again, or pick another one."),
    tr_later("{file} is one part of a split model, of which {names} cannot be found."),
    tr_later("Put all parts into one folder."),
    tr_later("{file} has the architecture '{name}', which Tandem cannot run yet."),
    tr_later("Pick a model of one of the {n} supported architectures, for example of {names}."),
    tr_later("Pick a model of one of the {n} supported architectures."),
    tr_later("{file} stores {tensor} as {type}, which Tandem cannot read."),
    tr_later("Pick the model in another quantisation, such as Q4_K_M or Q8_0."),
    tr_later("There is no device '{device}' on this machine."),
    tr_later("{device} has {size} free but {needed} are needed to load the model."),
    tr_later("Choose a smaller context or a smaller model, or give this device a smaller share."),
    tr_later("The prompt has {n} tokens but the context holds {n_ctx}."),
    tr_later("Load the model with a larger context, or shorten the conversation."),
    tr_later(
        "Even without older messages, the prompt has {n} tokens but the context holds {n_ctx}."
    ),
    tr_later(
        "Shorten the last message or the system prompt, or load the model with a larger context."
    ),
    tr_later(
        "Choose another chat template: in the split panel below “Requests, batch, pictures, RoPE,"
        " template”, or with --chat-template."
    ),
    tr_later("The plans cannot be written to {path}: {problem}."),
    tr_later("Make room on its disk, or permit writing there, then try again."),
    tr_later("{path} cannot be written: {problem}."),
    tr_later("Choose another folder, or make room on its disk."),
    tr_later("The model has been unloaded."),
    tr_later("Load the model again to go on; your chats are kept."),
    tr_later("{device} has stopped working: {problem}."),
    tr_later("Restart Tandem to use {device} again; models still run on the CPU."),
    tr_later("Port {port} of {host} is in use already."),
    tr_later("This system does not let you listen on port {port}."),
)
"""Sentences as the engine makes them; the first that fits is taken."""

NUMBERS: Final = frozenset(
    ("part", "rate", "prompts", "other_rate", "other_prompts", "size", "needed", "prose", "quoting")
)
"""What is filled in and is a number, in the window with the decimal sign of its language."""

PHRASES: Final = frozenset(("device", "devices", "others", "way"))
"""What is filled in and has words: devices, or where guesses come from."""

PHRASE_FORMS: Final = (
    tr_later("The CPU"),  # at the beginning of a sentence
    tr_later("the CPU"),
    tr_later("{n} ranks on the CPU"),
    tr_later("{n} ranks on {device}"),
    tr_later("{device} of machine {n}"),
    tr_later("from the text"),
    tr_later("by the model's own block (MTP)"),
    tr_later("by the draft model"),
)
"""Parts of what is filled in; the first that fits is taken."""

_LIST = re.compile(r"(, | and | \(\d+ %\))")

_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def translated(text: str) -> str:
    """Return sentences of the engine in the window's language, as far as their forms are known."""
    if language() == ENGLISH:
        return text
    whole = _in_form(text, FORMS)
    if whole is not None:
        return whole
    parts = _SENTENCE_END.split(text)
    return " ".join(_in_form(part, FORMS) or part for part in parts)


def _in_form(text: str, forms: Sequence[str]) -> str | None:
    """Return a text in the window's language; None if it has none of these forms."""
    for form in forms:
        found = _pattern(form).fullmatch(text)
        if found is not None:
            values = found.groupdict()
            return tr(form).format(**{name: _filled(name, v) for name, v in values.items()})
    return None


def _filled(name: str, value: str) -> str:
    """Return what stands in the place of a name."""
    if name in PHRASES:
        between = {" and ": tr(" and ")}
        parts = enumerate(_LIST.split(value))
        return "".join(
            between.get(part, part) if n % 2 else _in_form(part, PHRASE_FORMS) or part
            for n, part in parts
        )
    return decimal(value) if name in NUMBERS else value


@cache
def _pattern(form: str) -> re.Pattern[str]:
    """Return what fits the sentences of a form, with a group for each name."""
    parts = re.split(r"\{(\w+)\}", form)
    places = (
        f"(?P<{part}>{_filling(part)})" if n % 2 else re.escape(part)
        for n, part in enumerate(parts)
    )
    return re.compile("".join(places))


def _filling(name: str) -> str:
    """Return the pattern of what stands in the place of a name, and not of what follows it."""
    if name in NUMBERS:
        return r"[\d.]+(?: (?:%|[KMGT]i?B))?"
    return "[^;]+?" if name in PHRASES else ".+?"
