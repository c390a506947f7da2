"""The format of a model's answers is found by its chat template, in which calls survive."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from engine.text.messages import ChatMessage, ToolCall
from engine.text.tool_calls.turns import ANSWER_FORMATS, TemplateUse, as_functions, detect
from tests.helpers.answer_texts import TOOLS, parsed
from tests.helpers.call_templates import CALL_TEMPLATES
from tests.helpers.golden import golden_path

USES = dict[str, TemplateUse]()
QUESTION = ChatMessage("user", "Rain?")


def use_of(name: str) -> TemplateUse:
    if name not in USES:
        USES[name] = detect(ChatTemplate(CALL_TEMPLATES[name]))
    return USES[name]


@pytest.mark.parametrize("name", [form.name for form in ANSWER_FORMATS])
def test_the_format_is_found_by_a_call_that_the_template_writes(name: str) -> None:
    use = use_of(name)
    assert use.form.name == name
    assert use.writes_calls
    assert use.shows_tools == (name not in ("deepseek", "deepseek_v31"))
    assert use.has_text_arguments == (name == "deepseek_v31")
    assert use.has_short_ids == (name == "mistral")
    assert (use.thought_key == "thinking") == (name == "harmony")


@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "glm", "gemma4"])
def test_a_prompt_that_opens_a_thought_hides_no_mark(name: str) -> None:
    """Its end and a call may begin with the same characters."""
    opening = "<|channel>thought\n<channel|>" if name == "gemma4" else "<think>\n"
    source = CALL_TEMPLATES[name] + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    assert detect(ChatTemplate(source)).form.name == name


NAMES = {
    "Qwen-Qwen3-0.6B": "hermes", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "google-gemma-2-2b-it": "hermes", "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral", "openai-gpt-oss-120b": "harmony",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_published_templates_is_found(name: str) -> None:
    published = json.loads(golden_path("templates", f"{name}.json").read_text("utf-8"))
    template = ChatTemplate(published["template"], published["bos_token"], published["eos_token"])
    use = detect(template)
    assert use.form.name == NAMES[name]
    assert use.writes_calls == ("gemma" not in name)
    assert use.takes_system == ("gemma" not in name)
    if use.writes_calls:
        arguments = {"city": "Köln", "days": 3}
        assert written_and_read(
            use, template, [ToolCall("get_weather", json.dumps(arguments))]
        ) == [("get_weather", arguments)]


def written_and_read(use: TemplateUse, template: ChatTemplate, calls: list[ToolCall]) -> Any:
    """Return the calls in what a template makes of an answer that calls."""
    tools = as_functions(TOOLS) if use.shows_tools else None
    turns = use.turns([QUESTION, ChatMessage("assistant", "", tool_calls=tuple(calls))], ())
    asked = template.render(turns[:1], tools)
    text = template.render(turns, tools, add_generation_prompt=False)
    n = next((n for n, (a, b) in enumerate(zip(asked, text, strict=False)) if a != b), len(asked))
    return parsed(use.form, [text[n:]]).calls


texts = st.text(st.characters(codec="utf-8", exclude_characters="<>|\r"), max_size=12)
plain = st.none() | st.booleans() | st.integers(-9, 9) | texts
values = st.fixed_dictionaries(
    {"city": texts.filter(lambda text: text == text.strip("\n"))},
    optional={
        "days": st.integers(-(10**6), 10**6),
        "where": st.dictionaries(
            st.text("abc", min_size=1, max_size=3),
            st.recursive(
                st.none() | st.booleans() | st.integers(-9, 9) | texts, st.lists, max_leaves=4
            ),
            max_size=3,
        ),
        "exact": st.booleans(),
    },
)


@pytest.mark.parametrize("name", [form.name for form in ANSWER_FORMATS])
@given(arguments=values)
@settings(max_examples=12, deadline=None)
def test_calls_survive_the_template_and_the_parser(name: str, arguments: dict[str, Any]) -> None:
    calls = [ToolCall("get_weather", json.dumps(arguments), "call 1")]
    if name not in ("llama", "harmony", "gigachat"):  # one call in an answer
        calls.append(ToolCall("clock", "", "call 2"))
    read = written_and_read(use_of(name), ChatTemplate(CALL_TEMPLATES[name]), calls)
    assert read == [(call.name, json.loads(call.arguments or "{}")) for call in calls]


CALLED = [
    QUESTION,
    ChatMessage("assistant", "Let me see.", "Hm.", (ToolCall("clock", "{}", "a"),)),
    ChatMessage("tool", "It is 9.", tool_call_id="a"),
    ChatMessage("tool", "It is 10.", tool_call_id="b"),
]


@pytest.mark.parametrize("name", [form.name for form in ANSWER_FORMATS])
def test_a_call_that_broke_off_goes_back_without_arguments(name: str) -> None:
    """A client that has got one sends it back with what was wrong, and must be answered."""
    broken = ToolCall("get_weather", '{"city": "Ul', "call00001")
    called = ChatMessage("assistant", "", tool_calls=(broken,))
    result = ChatMessage("tool", "invalid JSON", tool_call_id="call00001")
    use = use_of(name)
    told = use.turns([QUESTION, called, result], TOOLS)
    read = use.turns(
        [QUESTION, replace(called, tool_calls=(replace(broken, arguments="{}"),)), result], TOOLS
    )
    assert told == read
    assert "get_weather" in ChatTemplate(CALL_TEMPLATES[name]).render(
        told, tools=as_functions(TOOLS)
    )


def test_results_name_their_functions_and_thoughts_go_where_the_template_wants_them() -> None:
    called, result = use_of("harmony").turns(CALLED, ())[1:3]
    assert result == {"role": "tool", "content": "It is 9.", "tool_call_id": "a", "name": "clock"}
    assert called["thinking"] == "Hm.\n\nLet me see."
    assert use_of("hermes").turns(CALLED, ())[1]["reasoning_content"] == "Hm."
    called, result = use_of("mistral").turns(CALLED, ())[1:3]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9


def test_results_stand_in_the_turn_that_calls_where_the_template_looks_for_them() -> None:
    results = [replace(CALLED[2], content='{"hour": 9}'), CALLED[3]]
    question, called, thanks = use_of("gemma4").turns([*CALLED[:2], *results, QUESTION], ())
    assert question == thanks == {"role": "user", "content": "Rain?"}
    assert called["tool_responses"] == [
        {"name": "clock", "response": {"hour": 9}}, {"name": "", "response": "It is 10."},
    ]  # fmt: skip
    text = ChatTemplate(CALL_TEMPLATES["gemma4"]).render([question, called])
    assert "<|tool_response>response:clock{hour:9}<tool_response|>" in text


TWO = (ToolCall("clock", "{}", "a"), ToolCall("get_weather", '{"city": "Ulm"}', "b"))


def test_a_template_that_takes_one_call_gets_each_in_a_turn_with_its_result() -> None:
    messages = [QUESTION, replace(CALLED[1], tool_calls=TWO), *CALLED[2:], QUESTION]
    use = use_of("llama")
    assert use.takes_one_call
    turns = use.turns(messages, ())
    assert [turn["role"] for turn in turns[1:]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
    ]
    assert [turns[n]["content"] for n in (1, 2, 3, 4)] == [
        "Let me see.",
        "It is 9.",
        "",
        "It is 10.",
    ]
    names = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
    assert names == ["clock", "get_weather"]
    unanswered = use.turns(messages[:2], ())
    assert [len(turn["tool_calls"]) for turn in unanswered[1:]] == [1, 1]
    assert use_of("harmony").takes_one_call
    assert not use_of("hermes").takes_one_call


def test_calls_are_numbered_where_the_model_knows_them_by_number() -> None:
    messages = [QUESTION, replace(CALLED[1], tool_calls=TWO), *CALLED[2:], *CALLED[1:3]]
    turns = use_of("kimi").turns(messages, ())
    ids = [call["id"] for turn in turns for call in turn.get("tool_calls", ())]
    assert ids == ["functions.clock:0", "functions.get_weather:1", "functions.clock:2"]
    results = [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"]
    assert results == ids


def test_a_thought_is_a_block_of_the_content_where_the_template_looks_for_it_there() -> None:
    blocks = """{%- if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}
    {{- "[THINK]" + b.thinking + "[/THINK]" if b.type == "thinking" else b.text }}{% endfor %}
    {%- endif %}"""
    source = CALL_TEMPLATES["mistral_args"].replace(
        "{%- elif m.tool_calls %}", "{%- else %}" + blocks
    )
    template = ChatTemplate(source.replace("{%- else %}{{ m.content }}</s>", ""))
    use = detect(template)
    assert use.thought_key == "blocks"
    turns = use.turns(CALLED[:2], ())
    assert turns[1]["content"] == [
        {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Let me see."},
    ]  # fmt: skip
    read = parsed(use.form, [template.render(turns, [], False).rpartition("[/INST]")[2]])
    assert (read.reasoning, read.calls) == ("Hm.", [("clock", {})])


def test_a_template_without_calls_gets_them_as_text() -> None:
    use = detect(ChatTemplate(DEFAULT_TEMPLATE))
    assert use.form.name == "hermes"
    assert not use.writes_calls
    system, question, called, results = use.turns(CALLED, TOOLS)
    assert '"get_weather"' in system["content"]
    assert question == {"role": "user", "content": "Rain?"}
    assert parsed(use.form, [called["content"]]).calls == [("clock", {})]
    assert results["role"] == "user"
    assert results["content"].index("It is 9.") < results["content"].index("It is 10.")


@pytest.mark.parametrize("name", ["granite", "kimi", "hermes"])
def test_a_template_that_only_names_a_mark_gets_calls_as_text_with_it(name: str) -> None:
    (form,) = (form for form in ANSWER_FORMATS if form.name == name)
    use = detect(ChatTemplate(DEFAULT_TEMPLATE + "{# Call with " + form.trigger + " #}"))
    assert (use.form.name, use.writes_calls) == (name, False)
    system, _, called, _ = use.turns(CALLED, TOOLS)
    assert form.trigger in system["content"]
    assert parsed(use.form, [called["content"]]).calls == [("clock", {})]


def test_a_template_without_a_system_prompt_gets_functions_with_the_question() -> None:
    source = (
        '{% for m in messages %}{{ raise_exception("no") if m.role == "system" }}{{ m.content }}'
    )
    use = detect(ChatTemplate(source + "{% endfor %}"))
    (question,) = use.turns([QUESTION], TOOLS)
    assert question["role"] == "user"
    assert "get_weather" in question["content"]
    assert question["content"].endswith("Rain?")


def test_a_broken_template_is_like_one_without_calls() -> None:
    assert not detect(ChatTemplate("{% for %}")).writes_calls


def test_marks_of_thoughts_are_those_of_the_template() -> None:
    source = CALL_TEMPLATES["hermes"] + "{# <seed:think> #}"
    form = detect(ChatTemplate(source)).form
    assert form.name == "hermes"
    assert parsed(form, list("<seed:think>Hm.</seed:think>Yes.")).reasoning == "Hm."
