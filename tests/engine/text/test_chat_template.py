"""Chat templates: their text, and that none can hang or fill the memory."""

import threading
import time
from datetime import datetime

import pytest

from engine.errors import TemplateError
from engine.text.chat_template import ChatTemplate, chat_template_from_metadata, fallback_template
from tests.helpers.vocabularies import metadata, spm, tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(HELLO, **variables)


def test_a_conversation_becomes_the_prompt() -> None:
    template = ChatTemplate(CHATML, bos_token="<s>")
    assert template.render(HELLO) == (
        "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_content_is_never_read_as_a_template() -> None:
    content = "{{ 1 + 1 }} <b>&amp;</b> {% raw"
    assert content in ChatTemplate(CHATML).render([{"role": "user", "content": content}])


def test_tojson_writes_plain_json_with_its_options() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'b': 2, 'a': 1} | tojson(indent=1, sort_keys=True) }}") == (
        '{\n "a": 1,\n "b": 2\n}'
    )
    assert render("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"


def test_the_date_comes_from_now() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source).render(HELLO, now=datetime(2026, 1, 15)) == "15 Jan 2026"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO) == str(datetime.now().year)


def test_blocks_leave_no_blank_lines_and_loops_can_break() -> None:
    source = """\
{% for n in range(9) %}
    {% if n == 1 %}{% continue %}{% endif %}
    {% if n == 3 %}{% break %}{% endif %}
{{ n }}
{% endfor %}
"""
    assert render(source) == "0\n2\n"


def test_loops_know_their_place() -> None:
    """The guard around a loop must not hide its length."""
    source = "{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ' ' }}{% else %}-{% endfor %}"  # noqa: E501
    assert render(source) == "1/3 2/3 3/3"
    assert render("{% for x in [] %}a{% else %}none{% endfor %}") == "none"
    assert render("{% for x in missing %}a{% else %}none{% endfor %}") == "none"
    assert render("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{% endfor %}") == "13"
    assert render(
        "{% for x in [[1, [2]], 3] recursive %}"
        "{{ loop(x) if x is sequence else x }}{% endfor %}"
    ) == "123"  # fmt: skip


def test_the_generation_tag_is_only_a_scope() -> None:
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}x{{ a }}{% endgeneration %}{{ a }}"
    assert render(source) == "x21"


def test_more_variables_and_tools_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ tools[0].name }}", tools=[{"name": "add"}]) == "add"


def test_tilde_joins_what_it_is_given() -> None:
    assert render("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}") == "a1None[2]"


def test_usual_formats_work() -> None:
    assert render("{{ 'In 2024 %s and %5.1f%%' % ('a', 2) }}") == "In 2024 a and   2.0%"
    assert render("{{ '{{\"year\": {0:>4} 12345}}'.format(7) }}") == '{"year":    7 12345}'
    assert render("{{ '%(a)s 2024' | format(a=1) }}") == "1 2024"


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(TemplateError, match="rejects this conversation: Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for %}", "line 1"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% include 'other' %}", "no loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("x" * (128 << 10) + "y", "131073 characters"),
    ],
)
def test_a_broken_template_is_an_error_with_its_reason(source: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__init__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_a_template_cannot_reach_python_or_change_the_conversation(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)
    assert HELLO == [{"role": "user", "content": "Hello"}]


SET_DOUBLE = "{% set n = namespace(x=X) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}"


def doubling(start: str, step: str, end: str = "") -> str:
    return SET_DOUBLE.replace("X", start).replace("STEP", step) + end


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 9 ** 999999999 }}",
        doubling("7", "n.x * n.x"),
        doubling("'aa'", "n.x + n.x"),
        doubling("'aa'", "n.x ~ n.x"),
        doubling("['ha']", "[n.x, n.x]", "{{ n.x }}"),
        doubling("['ha']", "[n.x, n.x]", "{{ n.x | tojson }}"),
        "{{ 'a' | center(99999999999) }}",
        "{{ ['a'] | map('center', 99999999999) | list }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%(a)-.99999999999f' % {'a': 1} }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999999) }}",
        "{{ '{a:99999999999}'.format_map({'a': 1}) }}",
        "{{ (1).to_bytes(99999999999, 'big') }}",
        "{{ [1] | slice(99999999999) | list }}",
        "{{ [1] | batch(99999999999, 0) | list }}",
        "{{ [1] | tojson(indent=99999999999) }}",
        "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
        "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}",
        "{% set a = 'a' * 1000000 %}{{ a.join(a) }}",
        "{{ range(99999) | join('a' * 1000000) }}",
        "{{ ('\n' * 1000000) | indent(1000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('a' * 1000000).translate({97: 'a' * 1000000}) }}",
        "{{ ('a ' * 100000) | wordwrap(1, wrapstring='a' * 100000) }}",
        "{{ lipsum(99999999) }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
        "{% macro m() %}" + "x" * 100_000 + "{% endmacro %}"
        "{% set x %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_makes_too_much_is_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        render(source)
    assert time.monotonic() - started < 4  # some ten milliseconds on an idle machine


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped_in_time(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"more than 0\.2 seconds"):
        ChatTemplate(source, max_seconds=0.2).render(HELLO)
    assert time.monotonic() - started < 3


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 3000
    assert len(ChatTemplate(CHATML).render(messages)) > 3_000_000
    source = (
        "{% for m in messages %}{% set t = m.content.replace('w', '  W') | trim %}"
        "{{ t.split('|')[-1].strip() | replace(' ', '_') + '\\n' }}{% endfor %}"
    )
    assert len(ChatTemplate(source).render(messages)) > 3_000_000
    assert len(ChatTemplate(source).render([{"content": "word " * 500_000}])) > 3_000_000


def test_a_template_that_counts_the_messages_at_each_of_them_takes_long_chats() -> None:
    """As many templates do; counting is not charged for what all the messages hold."""
    source = "{% for m in messages %}{% if loop.index == messages | length %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
    messages = [{"role": "user", "content": "word " * 200}] * 2999 + HELLO
    assert ChatTemplate(source).render(messages) == "Hello"


def test_threads_have_budgets_of_their_own() -> None:
    """One template used by the window and the server at once."""
    template = ChatTemplate(CHATML)
    expected = template.render(HELLO)
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(template.render(HELLO))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_a_model_without_a_template_gets_plain_text_and_says_so() -> None:
    tok = tokenizer(spm({"a": -1.0}))
    template = chat_template_from_metadata(metadata({}), tok)
    assert template.is_fallback
    conversation = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(conversation) == (
        "System: Be kind.\nUser: Hi\nAssistant: Hello!\nUser: Bye\nAssistant:"
    )
    assert fallback_template().render(HELLO, add_generation_prompt=False) == "User: Hello\n"
    assert template.stop_strings == ("\nUser:",)


def test_a_model_s_own_template_knows_its_special_tokens() -> None:
    tok = tokenizer(spm({"a": -1.0}))
    meta = metadata({"tokenizer.chat_template": "{{ bos_token }}x{{ eos_token }}"})
    template = chat_template_from_metadata(meta, tok)
    assert template.render(HELLO) == "<s>x</s>"
    assert not template.is_fallback
    assert template.stop_strings == ()
