"""Desks of both kinds of hosts, and a model."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Unload
from tests.helpers.desk import HOSTS, Desk
from tests.helpers.new_threads import new_threads
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def thread_desk() -> Iterator[Desk]:
    """Return a desk whose engine is in this process."""
    before = threading.enumerate()
    made = Desk()
    yield made
    assert made.host.close()
    assert new_threads(before, "tandem-engine", "tandem-rank") == []


@pytest.fixture(scope="session")
def process_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def process_desk(process_home: Path) -> Iterator[Desk]:
    """Return a desk whose engine is in a process, started once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(process_home))
        before = threading.enumerate()
        made = Desk("process")
    own = [thread for thread in threading.enumerate() if thread not in before]
    yield made
    assert made.host.close()
    assert [thread.name for thread in own if thread.is_alive()] == []


@pytest.fixture(params=list(HOSTS))
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Return a desk of each kind, without a model."""
    made: Desk = request.getfixturevalue(f"{request.param}_desk")
    yield made
    made.host.cancel()
    last = made.host.submit(Unload())
    while made.closing_any().command_id != last:
        pass


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=64))


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the engine's files: the test's own for an engine in this process."""
    if "[process" in request.node.name:
        return request.getfixturevalue("process_home")  # type: ignore[no-any-return]
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
