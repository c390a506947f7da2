"""Forms of errors and warnings, and of what is to be done about them."""

from __future__ import annotations

from typing import Final

from app.core.translation import tr_later

ERROR_FORMS: Final = (
    tr_later("There is no file {path}."),
    tr_later("A picture cannot be read: {problem}."),
    tr_later("A picture cannot be used: {problem}."),
    tr_later("The program that reads pictures cannot be started: {problem}."),
    tr_later("The program that checks grammars cannot be started: {problem}."),
    tr_later("The program that renders chat templates cannot be started: {problem}."),
    tr_later("{file} cannot be used: it has the tensor {name}, which MTP blocks do not have."),
    tr_later(
        "{file} cannot be used: its head has only some of the model's tokens, and it does not"
        " say which."
    ),
    tr_later("{file} cannot be used: {problem}."),
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
    tr_later("The prompt of {n} tokens exceeds the available context size of {n_ctx}."),
    tr_later("The prompt of at least {n} tokens exceeds the available context size of {n_ctx}."),
    tr_later("Load the model with a larger context, or shorten the conversation."),
    tr_later(
        "Even without older messages, the prompt of {n} tokens exceeds the available context size"
        " of {n_ctx}."
    ),
    tr_later(
        "Even without older messages, the prompt of at least {n} tokens exceeds the available"
        " context size of {n_ctx}."
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
    tr_later("You are not allowed to read {path}."),
    tr_later("Change the file's permissions."),
    tr_later("{path} is a folder."),
    tr_later("Pick a .gguf file in it."),
    tr_later("{path} is not a regular file."),
    tr_later("Pick a .gguf file."),
    tr_later("{path} cannot be read any more: {problem}."),
    tr_later("{path} cannot be read: {problem}."),
    tr_later("Check the drive that it is on, and the connection to it."),
    tr_later("{file} has become shorter while it was read."),
    tr_later("Copy or download it again."),
    tr_later("{file} was changed while it was read."),
    tr_later("Load it again once no other program writes to it."),
    tr_later("{file} has changed since the model was loaded."),
    tr_later("Load it again."),
    tr_later("Give all parts the names they were published under."),
    tr_later("Put the parts of one model together."),
    tr_later("It may be a vocabulary or a projector; pick the model itself."),
    tr_later("Pick a newer file of the same model."),
    tr_later("It may be of a newer variant; look for an update of Tandem or another file."),
    tr_later("{file} contains no tokenizer."),
    tr_later("Pick a file that was converted with its vocabulary."),
    tr_later("{file} uses the tokenizer {name}, which Tandem cannot run yet."),
    tr_later("Supported are: {names}."),
    tr_later("{file} holds no encoder of pictures."),
    tr_later("Choose the file whose name has mmproj in it."),
    tr_later(
        "{file} is for another model: it is made for {names} of width {width}, and this one is"
        " {type} of width {other}."
    ),
    tr_later("Choose the mmproj file that was published with the model."),
    tr_later("{file} has a projector of the type {name}, which Tandem cannot run yet."),
    tr_later("Without the file, the model reads text."),
    tr_later("It can run: {names}."),
    tr_later("{file} cannot see pictures: no mmproj file is loaded with it."),
    tr_later("Put the mmproj file published with the model beside it, and load it again."),
    tr_later("{file} has no vocabulary, so it can neither read nor write text."),
    tr_later("Pick a file with a tokenizer."),
    tr_later("The conversation has {n} pictures; at most {most} are taken."),
    tr_later("The model's chat template leaves pictures out."),
    tr_later("There is no message to answer."),
    tr_later("Write something first."),
    tr_later("The prompt is empty."),
    tr_later(
        "The model produced no usable probabilities for the next token (infinite or not a number)."
    ),
    tr_later("Load the model again; if it happens again the file may be damaged."),
    tr_later("The model's chat template rejects this conversation: {problem}"),
    tr_later("The model's chat template does not work: {problem}."),
    tr_later("The model's chat template has {n} characters; at most {most} are accepted."),
    tr_later("No device was chosen."),
    tr_later("Switch at least one device on."),
    tr_later("There is no device that a model can be put on."),
    tr_later("No model is loaded."),
    tr_later("Open a GGUF file first."),
    tr_later("PyTorch cannot be used ({problem})."),
    tr_later("Install it again."),
    tr_later("The engine stopped on an unexpected error ({problem})."),
    tr_later("This is a bug in Tandem; the log has the details. Load the model again to go on."),
    tr_later("The engine cannot be started: {problem}."),
    tr_later("The engine is not installed: {name} is missing."),
    tr_later(
        "The system had run out of memory and ended programs: choose a smaller context or model,"
        " or close other programs."
    ),
    tr_later("Load the model again; if this comes back, load it without {device}."),
    tr_later("Load the model again."),
    tr_later("If that much is free, this program has a limit of memory: raise it."),
    tr_later("No split of this model fits into what is free on these devices."),
    tr_later("Choose a smaller context, or more devices."),
    tr_later("{file} has no MTP block to guess with."),
    tr_later(
        "Choose another source of guesses, a file of the model with MTP, or put its mtp-….gguf"
        " beside it."
    ),
    tr_later("The MTP block of {name} models cannot be used yet."),
    tr_later("Choose another source of guesses."),
    tr_later("{file} cannot be a draft model: its recurrent layers cannot forget wrong guesses."),
    tr_later("Choose a model with attention only."),
    tr_later("Choose the file that was published with the model."),
    tr_later("Choose a smaller model of the same family."),
    tr_later("The plan '{plan}' needs {device}, which is not here."),
    tr_later("Choose another plan, or save it again."),
    tr_later("This is not a plan."),
    tr_later("{path} is not a plan."),
    tr_later("It must be a JSON file."),
    tr_later("The plan is of another version of Tandem."),
    tr_later("The plan is damaged."),
    tr_later("Save it again."),
    tr_later("{file} has {n} plans already."),
    tr_later("Delete some."),
    tr_later("This model has no experts to put on the CPU."),
    tr_later(
        "This model's {parts} have {size} elements, but a KV cache in {type} holds them in blocks"
        " of {block}."
    ),
    tr_later("Choose the KV type f16."),
    tr_later("The model's positions end at {n}, which limits the context."),
    tr_later("The model was trained for {n} tokens of context; longer texts get worse."),
    tr_later("This model has no chat template: plain text is used instead."),
    tr_later(
        "The pre-tokenizer {name} is unknown: the default one is used, and answers may be worse."
    ),
    tr_later("No pre-tokenizer is named: the default one is used, and answers may be worse."),
    tr_later("The file asks for a {name} token but has none."),
    tr_later("{key} is {id}, but there are only {n} tokens; it is ignored."),
    tr_later(
        "This model's values are part of its keys, so all of its KV cache is {type}, the type of"
        " keys; that of values has no effect."
    ),
    tr_later("There is no device '{device}' on this machine ({problem})."),
    tr_later("`tandem devices` lists what can be used."),
    tr_later("Run: {command}"),
    tr_later("Tandem's kernels do not work on {device}: {problem}."),
    tr_later("Set TANDEM_BACKEND=reference to do without them."),
    tr_later("Set TANDEM_BACKEND=reference to do without kernels of Tandem's own."),
    tr_later("The memory of {device} (rank {n}) is full."),
    tr_later("Choose a smaller context."),
    tr_later("Close other programs, then load the model again."),
    tr_later("{device} (rank {n}) lost the other ranks in the middle of a step."),
    tr_later("{device} (rank {n}) has ended in the middle of a step."),
    tr_later("{device} (rank {n}) did not answer the other devices in time."),
    tr_later("{device} (rank {n}) has computed other numbers than the others."),
    tr_later("NVIDIA's driver reports '{why_not}' ({name}: {number})."),
    tr_later("Load the model again; if that fails as well, restart Tandem."),
    tr_later("Load the model again; if that fails too, the device needs a restart."),
    tr_later("Weights could not be brought to {device}: {problem}"),
    tr_later("The window and the engine do not understand each other: {problem}."),
    tr_later("Restart Tandem, which may have been updated while it ran."),
    tr_later("Pictures of this model need batches of at least {n} tokens; they have {other}."),
    tr_later("Load it with larger batches of prompts, or without pictures."),
    tr_later("Let Tandem start programs, or leave the picture out."),
    tr_later("Let Tandem start programs, or leave the form of the answer open."),
    tr_later("Let Tandem start programs, or use prompts without a chat template."),
    tr_later("The conversation takes {n} bytes; chat templates get at most {most}."),
    tr_later("Shorten the conversation."),
    tr_later("{file} cannot be the draft model of {other}: {problem}."),
    tr_later("Choose a file with the whole head; Tandem can shorten it itself."),
    tr_later("There are only {n} tokens to guess from, not {wanted}."),
    tr_later("Nothing guesses from the first {n} tokens, as no MTP block is loaded."),
    tr_later("A loaded model can be split anew, but its '{name}' cannot change."),
    tr_later("Load it again for that."),
    tr_later("What is cached cannot be kept meanwhile: {problem}."),
    tr_later("Make room on the disk of temporary files."),
    tr_later("The grammar cannot be used at {place}: {problem}."),
    tr_later("The grammar cannot be used: {problem}."),
    tr_later("The grammar has {n} characters; at most {most} are accepted."),
    tr_later("The grammar is nested more than {n} deep."),
    tr_later("The grammar is nested too deep."),
    tr_later("The JSON schema cannot be used at {place}: {problem}."),
    tr_later("The JSON schema is nested more than {n} deep."),
    tr_later("The JSON schema is not JSON: it holds {name}."),
    tr_later("The JSON schema is not JSON: {problem} at {place}."),
    tr_later("The answer cannot go on in its form: {problem}."),
    tr_later("The answer that is to be continued does not have the form that is asked for."),
    tr_later("Have it answered anew, or leave the form of the answer open."),
    tr_later("An answer can have one form: a JSON schema, a grammar or a regular expression."),
    tr_later("Leave the others empty."),
    tr_later("Whatever the answer goes on with would be a banned string."),
    tr_later("Ban fewer or longer strings."),
    tr_later("The setting '{name}' is not known."),
    tr_later("It may come from a newer version."),
    tr_later("The setting '{name}' cannot be {value}."),
    tr_later("The setting '{name}' must be {wanted}, not {value}."),
    tr_later("{file} has no plan '{plan}'."),
    tr_later("'{name}' cannot be the name of a plan."),
    tr_later("Use up to {n} letters, and not '{name}'."),
    tr_later("The file may be damaged."),
    tr_later("Control vectors work with the model they were made for."),
    tr_later("Pick a GGUF with the architecture 'controlvector'."),
    tr_later("Pick another model."),
    tr_later("The time for a search must be from 1 to 86400 seconds."),
    tr_later("The text or the context is too short to be scored."),
    tr_later("What answers there is not Tandem."),
    tr_later("What answers there is not Tandem, or does not answer."),
    tr_later("No other machine can join at {address}: {problem}."),
    tr_later("The model is loaded again once all machines are there."),
    tr_later("Run tandem join there."),
)
"""Sentences as the engine makes them; the first that fits is taken."""


SYSTEM_FORMS: Final = (
    tr_later("No such file or directory"), tr_later("Permission denied"),
    tr_later("No space left on device"), tr_later("Read-only file system"),
    tr_later("Input/output error"), tr_later("Is a directory"), tr_later("Not a directory"),
    tr_later("File exists"), tr_later("File name too long"), tr_later("Disk quota exceeded"),
    tr_later("Too many open files"), tr_later("Operation not permitted"),
    tr_later("Transport endpoint is not connected"), tr_later("Stale file handle"),
    tr_later("Invalid argument"), tr_later("File too large"), tr_later("Cannot allocate memory"),
    tr_later("Connection refused"), tr_later("Connection reset by peer"),
    tr_later("Network is unreachable"), tr_later("Exec format error"),
)  # fmt: skip
"""Errors of the system, in the words of its C library."""

PROBLEM_FORMS: Final = (
    tr_later("it is empty"),
    tr_later("the file is truncated: it ends inside its header"),
    tr_later("the file is truncated: {n} of {total} bytes are missing"),
    tr_later("its header is longer than {size} MiB"),
    tr_later("it claims to have {n} tensors"),
    tr_later("it claims to have {n} metadata entries"),
    tr_later("it claims to have {n} layers"),
    tr_later("a metadata key claims to be {n} bytes long"),
    tr_later("a tensor's name claims to be {n} bytes long"),
    tr_later("a metadata key is not valid UTF-8"),
    tr_later("a tensor's name is not valid UTF-8"),
    tr_later("its metadata claims {n} texts"),
    tr_later("its metadata lacks '{key}'"),
    tr_later("'{key}' in its metadata is {type} instead of {wanted}"),
    tr_later("'general.architecture' in its metadata is not a name"),
    tr_later("'{key}' in its metadata has {n} entries for {layers} layers"),
    tr_later("'{key}' in its metadata has {n} entries, more than any model"),
    tr_later("'{key}' in its metadata is no list of flags"),
    tr_later("'{key}' in its metadata has a negative number"),
    tr_later("'{key}' is {value}, not from {low} to {high}"),
    tr_later("'{key}' cannot be {value}"),
    tr_later("it has two tensors with the name {name}"),
    tr_later("the tensor {name} has an empty dimension"),
    tr_later("rows of {n} in the tensor {name} do not fill {type} blocks of {size}"),
    tr_later("the data of {name} is not aligned to {n} bytes"),
    tr_later("the data of {name} and {other} overlap"),
    tr_later("the tensor {name} claims an impossible size or place"),
    tr_later("its tensor {name} is in {other} too"),
    tr_later("it is one of {n} parts, but its name does not end in '{name}'"),
    tr_later("its architecture differs from that of {name}"),
    tr_later("its parts have {n} tensors in all, not the number that it states"),
    tr_later("its content is part {n} of {total}, unlike its name"),
    tr_later("it is no control vector but a '{name}' file"),
    tr_later("it has no directions"),
    tr_later("its {name} has values that are no numbers"),
    tr_later(
        "its {name} ({type}, {shape}) does not fit a model of {n} layers with {width} numbers"
        " per token"
    ),
    tr_later("it has a BPE tokenizer without merges"),
    tr_later("its merges do not fit its tokens ({error})"),
    tr_later("it names a tokenizer but has no tokens"),
    tr_later("its vocabulary holds a token of {n} characters"),
    tr_later("its vocabulary holds the token {token} twice"),
    tr_later("it has {n} tokens but only {other} token types"),
    tr_later("it has {n} tokens but only {other} scores"),
    tr_later("it holds no weights (token_embd.weight is missing)"),
    tr_later("its vocabulary has {n} tokens but token_embd.weight {rows} rows"),
    tr_later("'{key}' is {n}, but it has more blocks"),
    tr_later("it holds each expert by itself, as files did until early 2024"),
    tr_later("{n} query heads cannot share {other} key-value heads"),
    tr_later("{n} heads cannot share {other} elements"),
    tr_later("no block has any of its {n} experts"),
    tr_later("it uses {n} of {total} experts"),
    tr_later("it rotates {n} of the {total} elements of a head"),
    tr_later("it scales positions by YaRN but not from which context"),
    tr_later("the tensor {name} is missing"),
    tr_later("the tensor {name} has shape {shape} instead of {wanted}"),
    tr_later("it has {name} twice, alone and as part of {other}"),
    tr_later("{name} cannot be taken apart ({error})"),
    tr_later("it has the tensor {name}, which {type} models do not have"),
    tr_later("it has more in the tensor {name} than {type} models have"),
    tr_later("it has the tensor {name}, which such encoders of pictures do not have"),
    tr_later("{name} and {other} both name the tokens of its MTP heads"),
    tr_later("the tensor {name} is no list of tokens"),
    tr_later("the tensor {name} names tokens that there are not"),
    tr_later("its metadata has the key {key} twice"),
    tr_later("its numbers are big-endian, which only a few servers use"),
    tr_later("its version is {n}, and only 2 and 3 can be read"),
    tr_later("its alignment is {n}, which is not a power of two"),
    tr_later("the metadata entry {key} claims {n} elements"),
    tr_later("the metadata entry {key} has the unknown type {type}"),
    tr_later("the metadata entry {key} is an array of arrays"),
    tr_later("the tensor {name} has {n} dimensions"),
    tr_later("block {n} has no heads"),
    tr_later("block {n} has no keys, and no block before it has any that fit its queries"),
    tr_later("it does not say how long its sliding windows are"),
    tr_later("it does not say how many positions it knows"),
    tr_later("it does not say which layers have a sliding window"),
    tr_later("it is an MPT model without ALiBi"),
    tr_later("it weighs experts in an unknown way ({n})"),
    tr_later("its MTP block has no attention"),
    tr_later("its experts have no columns"),
    tr_later("its gates have {n} elements and its values {other}"),
    tr_later("its keys and values are made of nothing (attention.kv_lora_rank)"),
    tr_later("its keys and values have heads of different sizes"),
    tr_later("its shared experts have no place beside the dense FFN"),
    tr_later("queries grow with their position, but from which is not said"),
    tr_later("{name} models have no routed experts"),
    tr_later("{n} of its {total} blocks are said to draft only"),
    tr_later("{n} of {total} experts cannot be chosen from {groups} of {others} groups"),
    tr_later(
        "{n} channels, {heads} heads and {groups} groups of a Mamba 2 layer do not fit together"
    ),
    tr_later(
        "{n} key heads and {heads} value heads of {size} elements do not make the {total}"
        " values of its linear attention"
    ),
    tr_later("it divides colours by zero"),
    tr_later("heads of its vision encoder cannot be rotated in two dimensions"),
    tr_later("the sizes of its vision encoder contradict each other"),
    tr_later("its pictures are smaller than what one token stands for"),
    tr_later("its pictures have more than {n} tokens"),
    tr_later("its windows are smaller than what one token stands for"),
    tr_later("the bounds of the number of its tiles contradict each other"),
    tr_later("the bounds of the sizes of its pictures contradict each other"),
    tr_later("{n} patches in a row cannot be averaged by {other}"),
    tr_later("{n} patches in a row cannot be merged by {other}"),
)
"""What is wrong with a GGUF file."""


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
