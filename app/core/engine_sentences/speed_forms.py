"""Forms of sentences on speeds: what limits one, and why a split was chosen or is the best."""

from __future__ import annotations

from typing import Final

from app.core.translation import tr_later

SPEED_FORMS: Final = (
    tr_later("No GPU holds the model alone."),
    tr_later("{split} over {gpus}: {rate} tok/s."),
    tr_later("{split} over {gpus}: {rate}, too little gain for {more}."),
    tr_later("{split} over {gpus}: {rate}; only prompts would gain from {more}."),
    tr_later(
        "{split} over {gpus}: {rate}, but prompts are read at {prompts} tok/s instead of"
        " {other_prompts}."
    ),
    tr_later("{split} over {gpus}: {rate}, {why}."),
    tr_later("{split} over {gpus}: {rate} tok/s, {others} alone: {other_rate}."),
    tr_later(
        "{split} over {gpus}: {rate} tok/s, {others} alone: {other_rate}, because only the slower"
        " GPU has room for the whole model."
    ),
    tr_later("Each GPU reads only its part of the weights, although {why}."),
    tr_later("{split}: {rate}, {why}."),
    tr_later("Over {gpus}: {rate}."),
    tr_later("Over {gpus}: {rate}, too little gain for {more}."),
    tr_later("Over {gpus}: {rate}, {why}."),
    tr_later("{gpus} has too little memory to help."),
    tr_later("{gpus} have too little memory to help."),
    tr_later("With {gpus}, which has room for a part only: {rate}."),
    tr_later("With {gpus}, which have room for a part only: {rate}."),
    tr_later("{gpus} is too small, so {part_of_model} are on the CPU: {rate} tok/s."),
    tr_later("{gpus} are too small, so {part_of_model} are on the CPU: {rate} tok/s."),
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
    tr_later("{gpus} alone: {rate} tok/s."),
    tr_later("{gpus} alone: {rate}."),
)
"""Sentences as the engine makes them; the first that fits is taken."""

DEVICE_FORMS: Final = (
    tr_later("The CPU"),  # at the beginning of a sentence
    tr_later("the CPU"),
    tr_later("{n} ranks on the CPU"),
    tr_later("{n} ranks on {device}"),
    tr_later("{device} of machine {n}"),
    tr_later("from the text"),
    tr_later("by the model's own block (MTP)"),
    tr_later("by the draft model"),
    tr_later("both"),
    tr_later("all {n} GPUs"),
    tr_later("the {n} GPUs"),
    tr_later("The {n} GPUs"),
    tr_later("{n} GPUs"),
)
"""What stands where a sentence names devices, or where guesses come from."""

SPLIT_FORMS: Final = (
    tr_later("Split by tensor"), tr_later("Split", "GPUs among which a model is split"),
    tr_later("By layer"), tr_later("In groups of {sizes}"),
)  # fmt: skip
"""How a model is split."""

MORE_FORMS: Final = (
    tr_later("a second GPU"), tr_later("{n} more GPUs"), tr_later("more GPUs"),
)  # fmt: skip
"""GPUs for which there is too little to gain."""

PART_FORMS: Final = (tr_later("the experts of {n} blocks"), tr_later("{n} blocks"))
"""What stands on the CPU where GPUs are too small."""

WHY_FORMS: Final = (
    tr_later("because only one group computes at a time"),
    tr_later("because only one GPU computes at a time"),
    tr_later("because each token waits {n} times {us} µs for the other GPU"),
    tr_later("because each token waits {n} times {us} µs for the other GPUs"),
    tr_later("each token waits {n} times {us} µs for the other GPU"),
    tr_later("each token waits {n} times {us} µs for the other GPUs"),
    tr_later("because {device} is slower; the other waits for it {part} of the time"),
    tr_later("because {device} is slowest; the other waits for it {part} of the time"),
    tr_later("because {device} is slowest; the others wait for it {part} of the time"),
    tr_later("limited by memory bandwidth"),
    tr_later("limited by compute"),
    tr_later("limited by the overhead of operations, which takes {part} of the time"),
    tr_later("limited by the links"),
    tr_later("limited by the work between tokens, such as sampling"),
)
"""Why one split is slower than another, as the end of a sentence."""
