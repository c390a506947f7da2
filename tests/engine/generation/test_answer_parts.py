"""Answers come in parts from the tokens on: thoughts, content and calls."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine import (
    AnswerRequest,
    ChatMessage,
    Finished,
    PromptError,
    SamplingParams,
    TokenText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from engine.formats.gguf.reader import GGUFFile
from engine.generation.answers import Answers
from engine.generation.prompts import Prompts
from engine.generation.results import GenerationEvent
from engine.generation.sequence import Background, Decode, Prefill, StepResult
from tests.helpers.answer_texts import CLOCK, WEATHER, is_object
from tests.helpers.call_templates import CALL_TEMPLATES
from tests.helpers.vocabularies import CONTROL, bpe, metadata

HERMES_LIKE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
MISTRAL_LIKE = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}
{%- if m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("nine letters") }}{% endif -%}
{{ call.function | tojson }}{{ ", " if not loop.last }}{% endfor %}]{% endif %}<|im_end|>
{%- endif %}{% endfor %}"""
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[INST]", "[/INST]", "[THINK]", "[/THINK]",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
QUESTION = ChatMessage("user", "Rain?")
GREEDY = SamplingParams(temperature=0, max_tokens=500)


def prompts_of(template: str) -> Prompts:
    values = bpe([], dict.fromkeys(SPECIAL, CONTROL))
    end = values["tokens"].index("<|im_end|>")
    meta = metadata({**values, "eos_token_id": end, "tokenizer.chat_template": template})
    return Prompts(cast(GGUFFile, SimpleNamespace(meta=meta)), "model")


@pytest.fixture(scope="module")
def hermes() -> Prompts:
    return prompts_of(HERMES_LIKE)


@pytest.fixture(scope="module")
def mistral() -> Prompts:
    return prompts_of(MISTRAL_LIKE)


def answered(
    prompts: Prompts, request: AnswerRequest, answer: str
) -> tuple[str, list[GenerationEvent]]:
    """Return the prompt of a request, and the events of an answer that a model would give."""
    tokenizer = prompts.tokenizer
    return computed(prompts, request, [*tokenizer.encode(answer, False, True), tokenizer.eos_id])


def computed(
    prompts: Prompts, request: AnswerRequest, results: Iterable[Any]
) -> tuple[str, list[GenerationEvent]]:
    """Return the prompt of a request, and the events with these tokens, or logits, as results."""
    tokenizer, script = prompts.tokenizer, iter(results)
    steps = Answers(prompts, 4000, is_marked=False).to(request)
    events, prompt = list[GenerationEvent](), ""
    found: StepResult | None = None
    while True:
        try:
            step = steps.send(found)
        except StopIteration:
            return prompt, events
        found = None
        if isinstance(step, Background):
            step.run()
        elif isinstance(step, Prefill | Decode):
            found = next(script)
            prompt = tokenizer.decode(step.ids) if isinstance(step, Prefill) else prompt
        else:
            events.append(step)


def summary(events: Sequence[GenerationEvent]) -> dict[str, Any]:
    """Return the parts that events tell, put together."""
    texts = [e for e in events if isinstance(e, TokenText)]
    begun = [e for e in events if isinstance(e, ToolCallBegun)]
    assert [e.index for e in begun] == list(range(len(begun)))
    assert all(len(e.id) == 9 and e.id.isalnum() for e in begun)
    assert len({e.id for e in begun}) == len(begun)
    ended = {e.index: e.is_whole for e in events if isinstance(e, ToolCallEnded)}
    assert [*ended] == [e.index for e in begun]
    written = [
        "".join(e.text for e in events if isinstance(e, ToolCallText) and e.index == n)
        for n in range(len(begun))
    ]
    assert [is_object(text) for text in written] == [*ended.values()]
    return {
        "reasoning": "".join(e.text for e in texts if e.part == "reasoning"),
        "content": "".join(e.text for e in texts if e.part == "content"),
        "calls": [
            (e.name, json.loads(text))
            for e, text in zip(begun, written, strict=True)
            if ended[e.index]
        ],
    }


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ASKED = AnswerRequest((QUESTION,), sampling=GREEDY, tools=(WEATHER,), in_parts=True)


def test_each_part_is_told_as_such_and_each_token_once(hermes: Prompts) -> None:
    answer = f"<think>\nHm…\n</think>\n\nI look.\n{CALL}"
    prompt, events = answered(hermes, ASKED, answer)
    assert "get_weather" in prompt
    calls = [("get_weather", {"city": "Ulm"})]
    assert summary(events) == {"reasoning": "Hm…", "content": "I look.", "calls": calls}
    ids = [i for e in events if isinstance(e, TokenText) for i in e.ids]
    assert hermes.tokenizer.decode(ids) == answer
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == len(ids)


def test_without_parts_the_text_is_told_as_it_is(hermes: Prompts) -> None:
    _, events = answered(hermes, replace(ASKED, in_parts=False), f"<think>Hm</think>{CALL}")
    assert summary(events)["content"] == f"<think>Hm</think>{CALL}"


def test_a_thought_that_the_prompt_opens_is_one(hermes: Prompts) -> None:
    prompt, events = answered(hermes, replace(ASKED, thinks=True), "Hm\n</think>\n\nNo.")
    assert prompt.endswith("<think>\n")
    assert summary(events) == {"reasoning": "Hm", "content": "No.", "calls": []}


def test_marks_that_are_control_tokens_are_read_and_never_shown(mistral: Prompts) -> None:
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Ulm", "Bonn")]
    _, events = answered(mistral, ASKED, f"Look: [TOOL_CALLS]{json.dumps(calls)}")
    found = summary(events)
    assert found["content"] == "Look:"
    assert found["calls"] == [("get_weather", {"city": city}) for city in ("Ulm", "Bonn")]
    for request in (replace(ASKED, tools=()), replace(ASKED, tool_choice="none", in_parts=False)):
        assert summary(answered(mistral, request, "a[TOOL_CALLS]b")[1])["content"] == "ab"


def test_no_choice_means_no_functions(hermes: Prompts) -> None:
    prompt, events = answered(hermes, replace(ASKED, tool_choice="none"), CALL)
    assert "get_weather" not in prompt
    assert summary(events)["content"] == CALL


@pytest.mark.parametrize(
    "wrong",
    [{"tool_choice": "=clock"}, {"tools": (), "tool_choice": "required"}, {"variables": "[1]"},
     {"variables": '{"messages": []}'}, {"variables": "{"},
     {"tools": (Tool("f", parameters="{"),)}, {"tools": (Tool("f", parameters="[]"),)}],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(hermes: Prompts, wrong: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        answered(hermes, replace(ASKED, **wrong), "")


def test_variables_win_over_other_wishes(hermes: Prompts) -> None:
    request = replace(ASKED, thinks=True, variables='{"enable_thinking": false}')
    assert answered(hermes, request, "")[0].endswith("assistant\n")


@pytest.mark.parametrize(
    "said", ["I look.\n<thi", "<think>\nHm", "<think>\nHm\n</think>\n\nI look"]
)
def test_an_answer_goes_on_from_its_tokens_and_in_its_part(hermes: Prompts, said: str) -> None:
    """As if it had not been interrupted, with or without its tokens."""
    asked, end = replace(ASKED, tools=()), "s> it.\n</think> End"
    whole = summary(answered(hermes, asked, said + end)[1])
    first = answered(hermes, asked, said)[1]
    parts = summary(first)
    last = ChatMessage("assistant", parts["content"], parts["reasoning"])
    ids = tuple(i for e in first if isinstance(e, TokenText) for i in e.ids)
    request = replace(asked, messages=(QUESTION, last), continue_last=True, begun=ids)
    prompt, events = answered(hermes, request, end)
    assert prompt.endswith("assistant\n" + said)
    rest = summary(events)
    assert parts["content"] + rest["content"] == whole["content"]
    assert parts["reasoning"] + rest["reasoning"] == whole["reasoning"]


def guesses(prompts: Prompts, seed: int, said: str = "") -> Iterator[Any]:
    """Yield tokens of a text, then logits by chance of a model that likes to end strings."""
    yield from prompts.tokenizer.encode(said, False, True)
    draw = np.random.default_rng(seed)
    likely = prompts.tokenizer.encode('"}]<>/:, ', False)
    while True:
        logits = draw.normal(size=prompts.tokenizer.n_vocab).astype(np.float32)
        logits[likely] += 3
        yield logits


@pytest.mark.parametrize("choice", ["required", "=get_weather"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_call_that_is_required_comes(
    name: str, choice: str, request: pytest.FixtureRequest
) -> None:
    prompts = request.getfixturevalue(name)
    asked = replace(ASKED, tools=(WEATHER, CLOCK), tool_choice=choice, thinks=False)
    for seed in range(3):
        _, events = computed(prompts, asked, guesses(prompts, seed))
        found = summary(events)
        assert found["calls"]
        last = events[-1]
        assert isinstance(last, Finished)
        assert not found["content"], "no mark of a call that is cut off"
        assert choice == "required" or {name for name, _ in found["calls"]} == {"get_weather"}


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_second_call_that_is_cut_off_is_left_out_and_may_go_on(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Left out before its name is known; then it is told, but not as whole."""
    prompts = request.getfixturevalue(name)
    calls = [json.dumps({"name": "get_weather", "arguments": {"city": c}}) for c in ("Ulm", "Bonn")]
    whole = f"[TOOL_CALLS][{', '.join(calls)}]"
    if name == "hermes":
        whole = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    n_tokens = len(prompts.tokenizer.encode("I look." + whole, False, True))
    for most in range(8, n_tokens, 2):
        asked = replace(ASKED, sampling=replace(GREEDY, max_tokens=most))
        _, events = answered(prompts, asked, "I look." + whole)
        found, last = summary(events), events[-1]
        assert isinstance(last, Finished)
        assert last.reason == "length"
        assert "I look.".startswith(found["content"])
        cities = [arguments["city"] for _, arguments in found["calls"]]
        assert cities == ["Ulm", "Bonn"][: len(cities)]


@pytest.mark.parametrize(("is_parallel", "cities"), [(True, ["Ulm", "Bonn"]), (False, ["Ulm"])])
def test_an_answer_ends_at_a_repeated_call_or_behind_the_only_one(
    hermes: Prompts, is_parallel: bool, cities: list[str]
) -> None:
    calls = [CALL.replace("Ulm", city) for city in ("Ulm", "Bonn", "Ulm", "Rome")]
    asked = replace(ASKED, parallel_tool_calls=is_parallel)
    _, events = answered(hermes, asked, "I look.\n" + "\n".join(calls))
    found, last = summary(events), events[-1]
    assert [arguments["city"] for _, arguments in found["calls"]] == cities
    assert isinstance(last, Finished)
    assert last.reason == "stop"
    n_tokens = len(hermes.tokenizer.encode("\n".join(calls), False, True))
    assert last.usage.completion_tokens < n_tokens
    told = [i for e in events if isinstance(e, TokenText) for i in e.ids]
    assert len(told) == last.usage.completion_tokens, "each token is told once"


def test_an_answer_that_is_cut_in_a_mark_goes_on_with_it(hermes: Prompts) -> None:
    said = "I look.\n<tool_ca"
    n_said = len(hermes.tokenizer.encode(said, False, True))
    cut = replace(ASKED, sampling=replace(GREEDY, max_tokens=n_said))
    first = answered(hermes, cut, said + "ll>")[1]
    assert summary(first)["content"] == "I look."
    ids = tuple(i for e in first if isinstance(e, TokenText) for i in e.ids)
    last = ChatMessage("assistant", "I look.")
    again = replace(ASKED, messages=(QUESTION, last), continue_last=True, begun=ids)
    rest = summary(answered(hermes, again, CALL.removeprefix("<tool_ca"))[1])
    assert rest == {"reasoning": "", "content": "", "calls": [("get_weather", {"city": "Ulm"})]}


def test_a_call_that_the_model_begins_keeps_to_the_schema(hermes: Prompts) -> None:
    begun = "I look.\n<tool_call>"
    for seed in range(3):
        _, events = computed(hermes, ASKED, guesses(hermes, seed, begun))
        (name, arguments), *_ = summary(events)["calls"]
        assert name == "get_weather"
        assert isinstance(arguments["city"], str)


@pytest.fixture(scope="module")
def llama() -> Prompts:
    return prompts_of(CALL_TEMPLATES["llama"])


def test_a_bare_call_that_the_model_begins_keeps_to_the_schema(llama: Prompts) -> None:
    begun = ('{"name": "get_weather", "parameters":', '{\n  "name":"get_weather", "parameters": {')
    for seed, said in enumerate(begun):
        _, events = computed(llama, ASKED, guesses(llama, seed, said))
        ((name, arguments),) = summary(events)["calls"]
        assert name == "get_weather"
        assert isinstance(arguments["city"], str)


@pytest.mark.parametrize(
    "answer",
    ['{"name": "Anna", "parameters": 3}', '{"name": "get_weather_of", "parameters": {"x": 1}}',
     '{"a": [1, 2]}', "{", '{"name": "get_weather", "about": 1}', 'Say {"name": "get_weather"}!'],
)  # fmt: skip
def test_an_answer_that_begins_with_a_brace_but_no_call_is_free(
    llama: Prompts, answer: str
) -> None:
    likely = [*llama.tokenizer.encode(answer, False, True), llama.tokenizer.eos_id]
    logits = np.zeros((len(likely), llama.tokenizer.n_vocab), np.float32)
    logits[range(len(likely)), likely] = 9
    _, events = computed(llama, ASKED, list(logits))
    assert summary(events) == {"reasoning": "", "content": answer, "calls": []}
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


def test_a_thought_comes_before_a_required_call(hermes: Prompts) -> None:
    asked = replace(ASKED, tool_choice="required")
    _, events = computed(hermes, asked, guesses(hermes, 1, "<think>\nHm\n</think>\n\n"))
    assert summary(events)["reasoning"] == "Hm"
    assert summary(events)["calls"]


def test_a_schema_that_no_grammar_can_say_is_no_hindrance_unless_it_must(hermes: Prompts) -> None:
    odd = Tool("odd", parameters='{"properties": {"a": {"$ref": "https://elsewhere/x"}}}')
    answer = '<tool_call>{"name": "odd", "arguments": {"a": 1}}</tool_call>'
    _, events = answered(hermes, replace(ASKED, tools=(odd,)), answer)
    assert summary(events)["calls"] == [("odd", {"a": 1})]
    with pytest.raises(PromptError, match=r"function odd cannot be used.* at #/properties/a"):
        answered(hermes, replace(ASKED, tools=(odd,), tool_choice="required"), "")


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "thought"),
    [(CALL_TEMPLATES["harmony"], THOUGHT), (MISTRAL_LIKE + "{# [THINK] #}", "[THINK]Hm.[/THINK]")],
)
def test_text_has_thoughts_between_the_marks_that_most_models_write(
    template: str, thought: str
) -> None:
    """So the window and the command line show them; an answer goes on from such text."""
    prompts = prompts_of(template)
    asked = AnswerRequest((QUESTION,), sampling=GREEDY)
    _, events = answered(prompts, asked, thought + "Yes.")
    text = summary(events)["content"]
    assert text == "<think>\nHm.\n</think>\n\nYes."
    ids = tuple(i for e in events if isinstance(e, TokenText) for i in e.ids)
    for said, begun in ((text, ids), (text, ()), ("<think>\nHm.", ())):
        again = replace(
            asked,
            messages=(QUESTION, ChatMessage("assistant", said)),
            continue_last=True,
            begun=begun,
        )
        is_thinking = said != text
        rest = thought.removeprefix(thought[: thought.index("Hm.") + 3]) if is_thinking else ""
        prompt, more = answered(prompts, again, rest + " No.")
        assert prompt.endswith(thought + "Yes." if not is_thinking else thought.removesuffix(rest))
        whole = said + summary(more)["content"]
        assert whole == (text.replace("Yes.", "No.") if is_thinking else text + " No.")
