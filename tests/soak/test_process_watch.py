"""A watched process that grows is told from one that only has garbage."""

import subprocess
import sys

import pytest

from tests.helpers.process_watch import ProcessWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it sends signals")

PROGRAM = """
import gc, sys, threading
gc.disable()
kept, lock = [], threading.Lock()
for line in sys.stdin:
    if line == "grow\\n":
        kept.append(bytearray(b"x") * 3_000_000)
        kept.append(open("/dev/null"))
    elif line == "litter\\n":
        circle = [bytearray(b"x") * 3_000_000]
        circle.append(circle)
        del circle
    print("done", flush=True)
"""


@pytest.mark.parametrize(("what", "found"), [("grow", ["files", "MiB"]), ("litter", [])])
def test_garbage_is_no_leak(what: str, found: list[str]) -> None:
    watch = ProcessWatch()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=watch.environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for at in range(8):
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            watch.measure(process.pid, 1000 * at)
        process.stdin.close()
    watch.close()
    problems = list(watch.leaks(1.0))
    assert [part for part in ("files", "MiB") if any(part in told for told in problems)] == found
    if what == "grow":
        assert watch.slope("server") == pytest.approx(3_000_000 / 2**20, rel=0.2)
    assert len(list(watch.lines())) == 3
