"""The process that renders templates: kept, replaced, and gone with the one that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from engine.errors import TemplateError
from engine.text import chat_template as child
from engine.text.chat_template import TemplateRenderer
from engine.text.templates.program import MAX_ADDED, MAX_REQUEST, MAX_SOURCE
from tests.helpers.prepared_templates import wait_for_templates
from tests.helpers.template_attacks import comparisons

HANG = dict(comparisons(60))["equal of lists, 60 deep"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    found = TemplateRenderer()
    yield found
    found.close()


def pid_of(renderer: TemplateRenderer) -> int:
    assert renderer._child is not None
    return renderer._child.pid


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; one that nobody waited for has, too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_one_process_renders_one_prompt_after_another(renderer: TemplateRenderer) -> None:
    assert renderer.render("{{ a }}!", {"a": "x"}, 2) == "x!"
    first = pid_of(renderer)
    with pytest.raises(TemplateError, match="does not work: line 1"):
        renderer.render("{% for %}", {}, 2)
    assert renderer.render("{{ a }}?", {"a": "y"}, 2) == "y?"
    assert pid_of(renderer) == first


def test_after_a_template_that_hung_the_next_prompt_has_a_new_process(
    renderer: TemplateRenderer,
) -> None:
    renderer.prepare()
    first = pid_of(renderer)
    with pytest.raises(TemplateError, match=r"runs for more than 0\.1 seconds"):
        renderer.render(HANG, {}, 0.1)
    assert is_gone(first)
    assert renderer.render("{{ 1 }}", {}, 2) == "1"
    assert pid_of(renderer) != first


def test_a_process_that_ended_between_prompts_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render("{{ 1 }}", {}, 2)
    first = psutil.Process(pid_of(renderer))
    first.kill()
    assert wait_until(lambda: is_gone(first.pid), 10)
    assert renderer.render("{{ 1 }}", {}, 2) == "1"


@posix
def test_a_process_that_is_stopped_does_not_hold_up_anybody(renderer: TemplateRenderer) -> None:
    """Not even with a request that is longer than a pipe holds."""
    renderer.render("{{ 1 }}", {}, 2)
    os.kill(pid_of(renderer), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TemplateError, match="runs for more than"):
        renderer.render("{{ a }}", {"a": "x" * 1_000_000}, 0.1)
    assert time.monotonic() - started < 3


@posix
def test_a_crash_is_a_sentence(renderer: TemplateRenderer) -> None:
    renderer.render("{{ 1 }}", {}, 2)
    pid = pid_of(renderer)
    timer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGSEGV))
    timer.start()
    with pytest.raises(TemplateError, match=r"crashed its renderer \(status -11\)"):
        renderer.render(HANG, {}, 20)
    timer.join()


def test_ctrl_c_is_not_for_the_process(renderer: TemplateRenderer) -> None:
    renderer.render("{{ 1 }}", {}, 2)
    if sys.platform != "win32":
        os.kill(pid_of(renderer), signal.SIGINT)
    assert renderer.render("{{ 2 }}", {}, 2) == "2"
    assert not is_gone(pid_of(renderer))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("/nowhere/at-all",), "No such file"),
        ((sys.executable, "-c", "import sys; sys.exit(7)"), "exited with status 7"),
    ],
)
def test_without_the_process_nothing_is_rendered(
    renderer: TemplateRenderer,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.setattr(child, "COMMAND", command)
    renderer.prepare()
    with pytest.raises(TemplateError, match=f"cannot be started: .*{reason}") as raised:
        renderer.render("{{ 1 }}", {}, 2)
    assert raised.value.hint
    monkeypatch.undo()
    assert renderer.render("{{ 1 }}", {}, 2) == "1"


def test_what_the_process_writes_to_its_error_output_is_not_shown(
    renderer: TemplateRenderer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TemplateError):
        renderer.render(HANG, {}, 0.1)
    assert capfd.readouterr() == ("", "")


def test_threads_are_served_in_turn(renderer: TemplateRenderer) -> None:
    results: dict[int, str] = {}

    def render(i: int) -> None:
        for _ in range(5):
            results[i] = renderer.render("{{ a }}", {"a": i}, 2)

    threads = [threading.Thread(target=render, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: str(i) for i in range(6)}


def test_any_text_goes_in_and_out(renderer: TemplateRenderer) -> None:
    text = 'a\n\r\u2028\x00\x1b é 漢 🙂 \ud800 \\ "'
    assert renderer.render("{{ a }}", {"a": text}, 2) == text


def test_what_is_too_long_or_not_for_json_is_a_sentence(renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateError, match="131073 characters; at most 131072"):
        renderer.render("x" * 131_073, {}, 2)
    with pytest.raises(TemplateError, match="chat templates accept at most"):
        renderer.render("{{ 1 }}", {"a": "x" * MAX_REQUEST}, 2)
    with pytest.raises(TemplateError, match="a object cannot be converted to JSON"):
        renderer.render("{{ 1 }}", {"a": object()}, 2)


def test_a_prompt_is_at_most_so_much_longer_than_the_conversation(
    renderer: TemplateRenderer,
) -> None:
    source = "{% for i in range(n) %}{{ 'x' * 1048576 }}{% endfor %}"
    n = MAX_ADDED >> 20
    assert len(renderer.render(source, {"n": n}, 2)) == MAX_ADDED
    with pytest.raises(TemplateError, match="produces text that is too long"):
        renderer.render(source, {"n": n + 1}, 2)
    long = "y" * 9_000_000
    assert len(renderer.render("{{ a }}", {"a": long}, 2)) == 9_000_000


PARENT = """
import sys
from engine.text.chat_template import shared_renderer
shared_renderer.render("{{ 1 }}", {}, 2)
print(shared_renderer._child.pid, flush=True)
if sys.argv[1]:
    shared_renderer.render(sys.argv[1], {}, 2)
sys.stdin.read()
"""


@pytest.mark.parametrize(("source", "seconds"), [("", 10), (HANG, 10)], ids=["idle", "rendering"])
def test_the_process_ends_with_the_one_that_started_it(source: str, seconds: float) -> None:
    """Even in the middle of a template that hangs, whose process was to be killed by another."""
    command = [sys.executable, "-c", PARENT, source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)  # the request is under way
        assert not is_gone(pid)
        parent.kill()
    assert wait_until(lambda: is_gone(pid), seconds)


WITHOUT_MEMORY = """
import resource, psutil
from engine.text.chat_template import shared_renderer
for _ in range(3):
    shared_renderer.render("{{ 1 }}", {}, 2)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms,) * 2)
filled = []
for size in (1 << 20, 1 << 16, 1 << 10, 64):
    try:
        while True:
            filled.append(bytearray(size))
    except MemoryError:
        pass
try:
    shared_renderer.render("{{ 1 }}", {}, 2)
finally:
    filled.clear()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it limits memory as Linux does")
def test_without_any_memory_nobody_waits_for_ever() -> None:
    """CPython waits for a thread that got no memory for its first step."""
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0 or "MemoryError" in done.stderr


def test_a_template_is_compiled_before_the_first_prompt(renderer: TemplateRenderer) -> None:
    """Compiling takes many times as long as rendering."""
    source, seconds = "{% if a %}{{ a }}{% endif %}" * 600, []
    for is_prepared in (False, True):
        renderer.close()
        renderer.prepare(source if is_prepared else "")
        wait_for_templates()
        child = psutil.Process(pid_of(renderer))
        before = child.cpu_times().user
        assert renderer.render(source, {"a": "x"}, 30) == "x" * 600
        seconds.append(child.cpu_times().user - before)
    assert seconds[1] < seconds[0] / 2


def test_a_template_that_hangs_while_it_is_prepared_does_no_harm(
    renderer: TemplateRenderer,
) -> None:
    began = time.monotonic()
    renderer.prepare(HANG)
    renderer.prepare("x" * (MAX_SOURCE + 1))
    renderer.prepare("{% broken")
    assert time.monotonic() - began < 2
    assert renderer.render("fine", {}, 2) == "fine"
    wait_for_templates()
    assert renderer.render("fine", {}, 2) == "fine"


def test_closing_does_not_wait_for_a_template(renderer: TemplateRenderer) -> None:
    renderer.prepare()
    wait_for_templates()
    caught = []

    def render() -> None:
        try:
            renderer.render(HANG, {}, 20)
        except TemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    renderer.close()
    assert time.monotonic() - began < 5
    thread.join(10)
    assert len(caught) == 1


def test_opening_a_file_starts_the_process() -> None:
    """So that the first message does not wait for it; `prepare` does not either."""
    code = (
        "from engine.text.chat_template import chat_template_from_metadata\n"
        "from engine.text.chat_template import shared_renderer\n"
        "from tests.helpers.vocabularies import metadata, spm, tokenizer\n"
        "chat_template_from_metadata(metadata({}), tokenizer(spm({'a': -1.0})))\n"
        "assert shared_renderer._child.is_running and not shared_renderer._child._is_ready\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
