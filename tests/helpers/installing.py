"""Installs a fake pack in a process of its own, which a test kills: LOCK STORE; says each stage."""

import sys
from pathlib import Path

from app.models.downloads.transfer import transfer
from app.setup.engine_pack.fetching import InstallProgress
from app.setup.engine_pack.installation import Installation
from app.setup.engine_pack.lock import read_lock
from app.setup.engine_pack.store import PackStore
from tests.helpers.fake_pack import SMOKE, fake_attempt

SLOW = f"import time; time.sleep(0.5)\n{SMOKE}"

transfer.SAVE_S = 0.05  # so that little of what arrived is lost with the process


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    lock, folder = map(Path, sys.argv[1:3])
    said: list[str] = []

    def told(progress: InstallProgress) -> None:
        if progress.stage.name not in said[-1:]:
            said.append(progress.stage.name)
            say(progress.stage.name)

    Installation(read_lock(lock), PackStore(folder), None, told, attempt=fake_attempt(SLOW)).run()
    say("DONE")


if __name__ == "__main__":
    main()
