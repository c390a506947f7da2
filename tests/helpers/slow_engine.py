"""The engine's process with a pause after each token, so that it can be killed in an answer.

`python -m tests.helpers.slow_engine HANDLE PARENT`, as `engine.hosts.process.program`.
"""

import sys
import time

from engine.events import Event
from engine.generation.results import TokenText
from engine.hosts.process import program
from engine.hosts.thread_host import ThreadHost
from engine.util.programs import program_command

PAUSE_S = 0.02

COMMAND = program_command("tests.helpers.slow_engine")


class SlowHost(ThreadHost):
    def _send(self, generation: int, event: Event) -> None:
        super()._send(generation, event)
        if isinstance(event, TokenText):
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    program.ThreadHost = SlowHost  # type: ignore[misc]
    sys.exit(program.main())
