"""Stand-in for `engine.runtime.interconnect.child` that behaves as its arguments say.

    python -m tests.helpers.fake_link_child BEHAVIOUR STEP [FOLDER]

BEHAVIOUR ("hang", "crash", "leave", "fail", "mute") happens in the step whose text is STEP, such as
"stores/peer"; others pass. Each process leaves a file in FOLDER with the GPUs that it sees.
"""

import json
import os
import sys
import time
from pathlib import Path

PASSED = {"verdict": "passed", "why": "", "seconds": {"1024": 1e-5}}


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(behaviour: str, where: str, folder: str = "") -> None:
    request = json.loads(sys.stdin.readline())
    if folder:
        path = Path(folder) / str(os.getpid())
        path.write_text(os.environ["CUDA_VISIBLE_DEVICES"], encoding="utf-8")
    if behaviour == "mute":
        time.sleep(60)
    if behaviour == "fail":
        sys.exit(3)
    sys.stdout.write("a line of something else\n")
    sys.stderr.write("something for people\n")
    for number, (a, b, means, place) in enumerate(request["steps"]):
        say(begin=number)
        assert a != b
        if where == f"{means}/{place}":
            if behaviour == "hang":
                time.sleep(60)
            if behaviour == "crash":
                os.abort()
            if behaviour == "leave":
                sys.exit(5)
        say(there=PASSED, back=PASSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
