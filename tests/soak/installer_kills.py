"""Kills the installation of an engine at random moments; an engine that answers stays in use.

    python -m tests.soak.installer_kills --rounds 500 --seed 1

Packs are small and without torch. Each round installs a newer one in a process that is killed while
it fetches, unpacks, tries it or puts it into use; every other round then goes on to the end.
"""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from app.models.downloads.transfer.transfer import Patience
from app.setup.engine_pack.installation import Installation
from app.setup.engine_pack.lock import read_lock
from app.setup.engine_pack.store import Pack, PackStore
from tests.helpers.fake_pack import FakePack, adopt_pack, fake_attempt, make_pack
from tests.helpers.hostile_server import Mischief, hostile_server
from tests.soak.campaign import Report, run_campaign
from tests.soak.remains import descendants, still_alive

STAGES = {"FETCHING": 0.6, "CHECKING": 0.05, "UNPACKING": 0.3, "TRYING": 1.0, "DONE": 0.01}
"""Stages in which installations are killed, and about how many seconds each lasts."""

N_BYTES = 4_000_000
START_S = 60.0
END_S = 15.0
"""Seconds in which what a killed installation has started ends by itself."""


class InstallerKills:
    """A store of engines whose installations are killed again and again."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        self._home, self._chance = home, random.Random(seed)
        self._names = [only] if only else list(STAGES)
        self._store = PackStore(home / "engines")
        self._context = hostile_server()
        self._server = self._context.__enter__()
        self._used = adopt_pack(self._store)
        self.report = Report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def close(self) -> None:
        """Check that a sweep leaves the two packs and what was fetched.

        Raises:
            AssertionError: there is more, or less.
        """
        self._store.sweep()
        names = {path.name for path in self._store.folder.iterdir()}
        kept = {pack.name for pack in (self._store.current, self._store.previous) if pack}
        assert kept <= names <= kept | {"lock", "current.json", "fetched"}, names

    def round(self, number: int) -> None:
        """Kill an installation, and check which engine is in use.

        Raises:
            AssertionError: none is, or one that does not answer.
        """
        stage = self._names[number % len(self._names)]
        pack = make_pack(self._home, self._server.url, f"9.1.{number}", N_BYTES)
        self._server.files = pack.files()
        self._server.plan = lambda _: Mischief(pause_s=0.001)
        self._kill(pack, stage)
        before = self._check(pack)
        figures = {}
        if before.version != pack.version and number % 2:
            self._server.plan = lambda _: None
            began = time.monotonic()
            self._go_on(pack)
            figures = {"going on": time.monotonic() - began}
        self._used = self._check(pack)
        shutil.rmtree(pack.wheels)
        self.report.add(f"{stage.lower()}{' (in use)' * (before.version == pack.version)}", figures)

    def _kill(self, pack: FakePack, stage: str) -> None:
        """Install a pack in a process, and kill it some time after it has begun a stage."""
        command = [sys.executable, "-P", "-m", "tests.helpers.installing"]
        with subprocess.Popen(
            [*command, str(pack.lock), str(self._store.folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == stage:
                    break
            time.sleep(self._chance.uniform(0, STAGES[stage]))
            family = {process.pid} | descendants(process.pid)
            process.kill()
        until = time.monotonic() + END_S
        while (alive := still_alive(family)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive, f"these run on: {alive}"

    def _check(self, pack: FakePack) -> Pack:
        """Return the pack in use, which answers: that of before, or the new one."""
        current = self._store.current
        assert current is not None, "no engine is in use"
        assert current.is_usable
        assert current.version in (self._used.version, pack.version)
        assert fake_attempt()(current.folders).version == current.version
        return current

    def _go_on(self, pack: FakePack) -> None:
        """Install what was killed to the end, without fetching again what had arrived."""
        lock = read_lock(pack.lock)
        running = Installation(
            lock, self._store, patience=Patience(tries=2, base_s=0.01), attempt=fake_attempt()
        )
        arrived = running.n_fetched
        self._server.asked.clear()
        assert running.run().pack.version == pack.version
        fetched = sum((asked.end or 0) - (asked.start or 0) for asked in self._server.asked)
        assert fetched == lock.n_bytes - arrived, "what had arrived was fetched again"


if __name__ == "__main__":
    sys.exit(run_campaign(InstallerKills, __doc__))
