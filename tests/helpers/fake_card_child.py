"""Stand-in for `engine.backends.gpu.self_test` that behaves as its arguments say.

    python -m tests.helpers.fake_card_child BEHAVIOUR FOLDER

Each process leaves a file in FOLDER with the GPU that it sees.
"""

import json
import os
import sys
import time
from pathlib import Path


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(behaviour: str, folder: str) -> None:
    assert json.loads(sys.stdin.readline()) == {"device": "cuda:0"}
    path = Path(folder) / str(os.getpid())
    path.write_text(os.environ["CUDA_VISIBLE_DEVICES"], encoding="utf-8")
    sys.stderr.write("something for people\n")
    if behaviour == "fail":
        sys.exit(3)
    if behaviour == "mute":
        time.sleep(60)
    say(begin="opening the GPU")
    if behaviour == "refuse":
        say(refused="CUDA out of memory")
        return
    sys.stdout.write("a line of something else\n")
    say(begin="norms")
    say(begin="products")
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "crash":
        os.abort()
    if behaviour == "leave":
        return
    said = {"wrong": "a norm came out wrong", "fault": "RuntimeError: CUDA error"}
    say(problem=said.get(behaviour, ""), has_fault=behaviour == "fault")


if __name__ == "__main__":
    main(*sys.argv[1:])
