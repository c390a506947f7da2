"""Commands and events as bytes: all come back as they were, and nothing else gets through."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import device

from engine import (
    AnswerRequest,
    Command,
    ControlVector,
    EngineError,
    Event,
    Failed,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    ModelUnloaded,
    SamplingParams,
    Timings,
    TokenText,
    Usage,
    errors,
)
from engine.backends.executor import RankOutOfMemory
from engine.events import Unload
from engine.hardware.cuda_api import CudaCallError
from engine.hardware.fallbacks import Fallback
from engine.hosts.process.channel import (
    FROM_ENGINE,
    TO_ENGINE,
    BeatMessage,
    CancelMessage,
    CloseMessage,
    EventsMessage,
    SubmitMessage,
)
from engine.hosts.process.codec import MAX_BYTES, PROTOCOL, Codec, MessageError, field_hints
from engine.load_params import MAX_ROPE_BASE, MAX_ROPE_FACTOR, ROPE_SCALINGS
from engine.sampling_params import SAMPLERS

LETTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff")
"""Characters of texts; a path has surrogates for bytes that are not UTF-8."""

TEXTS = st.text(LETTERS, max_size=8)
COUNTS = st.integers(1, 1 << 40)
SCALARS = {
    str: TEXTS,
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    NoneType: st.none(),
}

CPU = device("cpu")

ERRORS = [
    errors.ImageError("A picture cannot be used.", "Send another one."),
    errors.EngineError("What.", "Do."),
    errors.InvalidGGUF("a.gguf", "it is broken"),
    errors.MissingShard("a.gguf", ["b.gguf"]),
    errors.UnsupportedArchitecture("a.gguf", "x", ["llama"]),
    errors.UnsupportedQuant("a.gguf", "Q9", "w"),
    errors.NoDevice("cuda:9", "why"),
    errors.MachineLost("box does not answer.", "Start it again."),
    errors.OutOfDeviceMemory("cpu", 2, 1, "to load"),
    errors.KernelError("cuda:0", "it is wrong"),
    errors.DeviceStopped("cuda:0", "an illegal address"),
    errors.CommError(1, "stalled", "cuda:1"),
    errors.LeftAlone(2),
    errors.SplitError("It cannot be cut."),
    errors.ContextOverflow(5, 4),
    errors.TemplateError("It is broken."),
    errors.ToolError("It cannot be used.", "add"),
    errors.GrammarError("It is no schema.", "/properties/a"),
    errors.StateFileError("chat.state", "It is damaged."),
    errors.ModelBusy("it answers"),
    errors.Cancelled("Loading"),
    errors.EngineMissing("torch"),
    errors.EngineCrashed("The engine was killed.", "Load again."),
]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is LoadParams:
        return LOAD_PARAMS
    if hint is SamplingParams:
        return SAMPLING
    if hint is ControlVector:
        return st.builds(ControlVector, path=TEXTS, scale=st.floats(-9, 9))
    if hint is EngineError:
        return st.sampled_from(ERRORS)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of([values(one) for one in inner])
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    assert is_dataclass(hint), hint
    return st.builds(hint, **{name: values(inner) for name, inner in field_hints(hint).items()})


LOAD_PARAMS = st.builds(
    LoadParams,
    **{
        **{name: values(hint) for name, hint in field_hints(LoadParams).items()},
        "devices": st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
        "split_mode": st.sampled_from(["tensor", "layer", "groups"]),
        "kv_type": st.sampled_from(["f16", "q8_0", "q8_0/q4_0"]),
        "parallel": st.integers(1, 16),
        "draft": st.sampled_from(["auto", "off", "ngram", "mtp", "small.gguf"]),
        "draft_max": st.integers(1, 15),
        "draft_vocab": st.just(0) | st.integers(256, 1 << 20),
        "mmproj": st.sampled_from(["auto", "off", "mmproj.gguf"]),
        "mmproj_device": st.sampled_from(["auto", "cpu"]),
        "checkpoint_bytes": st.none() | st.integers(0, 1 << 40),
        "n_ctx": st.none() | COUNTS,
        "cpu_threads": st.none() | COUNTS,
        "n_batch": st.none() | COUNTS,
        "groups": st.none() | st.lists(COUNTS, max_size=2).map(tuple),
        "machines": st.lists(COUNTS, max_size=2).map(tuple),
        "machine_link": st.sampled_from(["auto", "nccl", "gloo"]),
        "n_cpu_blocks": COUNTS,
        "n_cpu_moe": COUNTS,
        "reserve": st.lists(st.tuples(TEXTS, COUNTS), max_size=2).map(tuple),
        "rope_scaling": st.sampled_from(ROPE_SCALINGS),
        "rope_factor": st.just(0.0) | st.floats(1, MAX_ROPE_FACTOR),
        "rope_base": st.just(0.0) | st.floats(1, MAX_ROPE_BASE),
        "control_layers": st.none() | st.tuples(st.integers(0, 5), st.integers(5, 9)),
    },
)  # fmt: skip
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1000),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 1 << 31),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    on_overflow=st.sampled_from(["stop", "shift"]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 9), st.floats(-9, 9) | st.just(-math.inf)), max_size=2
    ).map(tuple),
    samplers=st.permutations(SAMPLERS).map(tuple),
    mirostat=st.booleans(),
)


@pytest.mark.parametrize("kind", get_args(Command), ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_command_arrives_as_it_was(kind: type, data: st.DataObject) -> None:
    message = SubmitMessage(data.draw(st.integers()), data.draw(values(kind)))
    assert TO_ENGINE.unpack(TO_ENGINE.pack(message)) == message


@pytest.mark.parametrize(
    "kind", [kind for kind in get_args(Event) if kind is not Failed], ids=lambda kind: kind.__name__
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_event_arrives_as_it_was(kind: type, data: st.DataObject) -> None:
    message = EventsMessage((HostEvent(data.draw(st.integers()), data.draw(values(kind))),))
    assert FROM_ENGINE.unpack(FROM_ENGINE.pack(message)) == message


def test_messages_without_contents_arrive() -> None:
    for message in (CancelMessage(), CloseMessage()):
        assert TO_ENGINE.unpack(TO_ENGINE.pack(message)) == message
    assert FROM_ENGINE.unpack(FROM_ENGINE.pack(BeatMessage())) == BeatMessage()


def sent(error: EngineError) -> EngineError:
    """Return an error as it arrives."""
    message = EventsMessage((HostEvent(3, Failed(error, is_model_lost=True)),))
    arrived = FROM_ENGINE.unpack(FROM_ENGINE.pack(message))
    assert isinstance(arrived, EventsMessage)
    failed = arrived.events[0].event
    assert isinstance(failed, Failed)
    assert failed.is_model_lost
    return failed.error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_with_its_class_and_all_it_knows(error: EngineError) -> None:
    arrived = sent(error)
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert (str(arrived), arrived.args) == (str(error), error.args)


def test_every_class_of_errors_is_tried_here() -> None:
    tried = {base for error in ERRORS for base in type(error).__mro__}
    assert {cls for cls in FROM_ENGINE.classes if issubclass(cls, EngineError)} <= tried


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (CudaCallError("It fails.", "Do.", 7), EngineError),
        (RankOutOfMemory(1, CPU), errors.DeviceError),
    ],
    ids=["cuda", "rank"],
)
def test_an_error_of_another_module_arrives_as_its_base(
    error: EngineError, base: type[EngineError]
) -> None:
    arrived = sent(error)
    assert type(arrived) is base
    assert (arrived.message, arrived.hint) == (error.message, error.hint)


def test_an_error_with_more_attributes_than_it_declares_arrives_without_them() -> None:
    error = EngineError("What.")
    error.frames = [object()]  # type: ignore[attr-defined]
    assert not hasattr(sent(error), "frames")


@dataclass(frozen=True)
class Foreign:
    """A command that nobody has declared."""


@pytest.mark.parametrize(
    "command",
    [Foreign(), LoadProgress(1, 2), Load, Load(LoadParams(object())), {"a": 1}],  # type: ignore[arg-type]
    ids=["foreign", "an event", "a class", "an object inside", "a dict"],
)
def test_what_is_not_declared_is_not_written(command: Any) -> None:
    with pytest.raises(MessageError):
        TO_ENGINE.unpack(TO_ENGINE.pack(SubmitMessage(1, command)))


def refused(message: object, version: object = PROTOCOL) -> bool:
    """Return whether the engine refuses a message in terms of JSON."""
    try:
        TO_ENGINE.unpack(json.dumps([version, message]).encode())
    except MessageError:
        return True
    return False


def submit(command: object, **changes: object) -> dict[str, object]:
    return {"type": "SubmitMessage", "command_id": 1, "command": command, **changes}


UNLOAD = {"type": "Unload"}
LOAD_STATE = {"type": "LoadState", "path": "x"}


def test_only_whole_declared_messages_are_read() -> None:
    assert not refused(submit(UNLOAD))
    assert not refused(submit(LOAD_STATE))
    assert refused(submit(UNLOAD), version=PROTOCOL + 1)
    assert refused(submit(UNLOAD), version=True)
    assert refused(submit(UNLOAD, more=1)), "a field that it has not"
    assert refused({"type": "SubmitMessage", "command_id": 1}), "a field that is missing"
    assert refused(submit(UNLOAD, command_id=True)), "no number"
    assert refused(submit(UNLOAD, command_id="1"))
    assert refused(submit(UNLOAD, generation=None))
    for command in (
        {"type": "Popen", "args": "x"}, {"type": "ModelUnloaded"}, {"type": "SubmitMessage"},
        {"type": ["Unload"]}, {}, [], None, 1, "Unload", {**LOAD_STATE, "path": 1},
        {**LOAD_STATE, "path": {"type": "Unload"}},
    ):  # fmt: skip
        assert refused(submit(command)), command
    assert refused(None)
    assert refused(UNLOAD), "a command by itself is no message"


def test_values_that_a_class_refuses_are_refused() -> None:
    plain = json.loads(TO_ENGINE.pack(SubmitMessage(1, Load(LoadParams("m")))))[1]
    assert not refused(plain)
    plain["command"]["params"]["devices"] = []
    assert refused(plain)
    plain["command"]["params"]["devices"] = ["cpu", 1]
    assert refused(plain)


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"null", b"[1]", b"[1,2,3]", "[1,\"ä\"]".encode(), b"[" * 100_000, b"\x80\x04N."],
    ids=["nothing", "text", "null", "one", "three", "not ascii", "deep", "pickle"],
)  # fmt: skip
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        TO_ENGINE.unpack(data)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_change_of_a_byte_does_more_than_being_refused(data: st.DataObject) -> None:
    usage = Finished("stop", Usage(1, 2, 3), Timings(0.5))
    packed = bytearray(FROM_ENGINE.pack(EventsMessage((HostEvent(1, usage),))))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        assert isinstance(FROM_ENGINE.unpack(bytes(packed)), EventsMessage | BeatMessage)


def test_a_message_that_is_too_large_is_a_sentence() -> None:
    with pytest.raises(MessageError, match="too large"):
        TO_ENGINE.pack(SubmitMessage(1, AnswerRequest(prompt="x" * MAX_BYTES)))


def test_texts_and_numbers_at_their_limits_arrive() -> None:
    event = HostEvent(1, TokenText("\x00\ud7ff\U0010ffff\n\udc80", (0, -1, 1 << 63)))
    assert FROM_ENGINE.unpack(FROM_ENGINE.pack(EventsMessage((event,)))) == EventsMessage((event,))
    assert TO_ENGINE.unpack(TO_ENGINE.pack(SubmitMessage(1, Unload()))) == SubmitMessage(
        1, Unload()
    )
    last = EventsMessage((HostEvent(2, ModelUnloaded()),))
    assert FROM_ENGINE.unpack(FROM_ENGINE.pack(last)) == last


@given(why=st.text(st.sampled_from(" .x\n\t\u2003"), max_size=6))
def test_a_fallback_made_from_another_is_the_same(why: str) -> None:
    made = Fallback("graph", ("cuda:0", "cuda:0"), why)
    assert Fallback(made.kind, made.devices, made.why, made.help) == made


def sentence(template: object, **values: object) -> dict[str, object]:
    return {"type": "Sentence", "template": template, "values": values}


def deep(n: int) -> dict[str, object]:
    found = sentence("end {n}", n=1)
    for _ in range(n):
        found = sentence("{x}", x=found)
    return found


@pytest.mark.parametrize(
    "text",
    [
        sentence("{n} {m}", n=1), sentence("{n:{x}}", n=1), sentence("{n:{}}", n=1), sentence(7),
        sentence("{n:c}", n=1 << 70), sentence("{n", n=1), sentence("{n}", n=[1]), deep(450),
        sentence("{n:9999999}", n=1),
    ],
)  # fmt: skip
def test_a_sentence_that_cannot_be_filled_in_is_refused(text: dict[str, object]) -> None:
    assert not refused(submit({"type": "LoadState", "path": sentence("of {n} files", n=3)}))
    assert refused(submit({"type": "LoadState", "path": text}))


@dataclass(frozen=True)
class Names:
    names: tuple[str, ...]


def test_a_sentence_is_no_list_of_strings() -> None:
    codec: Codec[Names] = Codec(Names)
    assert codec.unpack(codec.pack(Names(("a", "b")))) == Names(("a", "b"))
    wrong = {"type": "Names", "names": sentence("abc")}
    with pytest.raises(MessageError):
        codec.unpack(json.dumps([PROTOCOL, wrong]).encode())
