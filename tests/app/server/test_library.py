"""Several models of `tandem serve`: a request that names another one has that loaded."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.core.paths import demo_model
from app.server.async_engine import AsyncEngine
from app.server.models import LibraryModels, ModelShelf, SingleModel, find_model
from app.server.refusal import Refusal
from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    Load,
    LoadParams,
    Unload,
    read_model_info,
)
from tests.helpers.fake_host import FakeHost, Script


@dataclass
class Played:
    """What a test acts on."""

    models: LibraryModels
    async_engine: AsyncEngine
    host: FakeHost

    @property
    def loads(self) -> list[str]:
        """Names of the files that were loaded."""
        return [Path(one.params.path).name for one in self.host.commands if isinstance(one, Load)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the demo model under two names, and a file that is no model."""
    for name in ("one.gguf", "two.gguf"):
        shutil.copy(str(demo_model()), tmp_path / name)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    return tmp_path


def play(
    folder: Path, act: Callable[[Played], Awaitable[None]], keep_s: float | None = None
) -> Played:
    """Do something with the models of a folder behind a scripted host."""

    def choose(path: str) -> LoadParams:
        if Path(path).name == "two.gguf" and (folder / "refuse").exists():
            raise EngineError("It does not fit.")
        return LoadParams(path)

    async def run() -> Played:
        async_engine = AsyncEngine(
            lambda command: host.submit(command), lambda number: host.cancel(number)
        )
        async_engine.open()
        host = FakeHost(async_engine.on_event, Script(others={"Endless": Script(hold=True)}))
        path = str(folder / "one.gguf")
        first = SingleModel(async_engine, LoadParams(path), read_model_info(path))
        shelf = ModelShelf(lambda: sorted(folder.glob("*.gguf")))
        models = LibraryModels(async_engine, first, shelf, choose, keep_s)
        played = Played(models, async_engine, host)
        try:
            models.open()
            while not shelf.models:
                await asyncio.sleep(0.01)
            await act(played)
        finally:
            models.close()
            async_engine.close()
            host.close()
        return played

    return asyncio.run(run())


def test_what_can_be_run_is_offered_once(folder: Path) -> None:
    async def act(played: Played) -> None:
        assert [one.id for one in played.models.offered()] == ["one", "two"]
        await played.models.ready("one")
        ready = {one.id: one.n_ctx is not None for one in played.models.offered()}
        assert ready == {"one": True, "two": False}
        assert find_model(played.models, "two.gguf").id == "two"
        with pytest.raises(Refusal, match="available: one, two"):
            find_model(played.models, "three")

    play(folder, act)


def test_the_model_that_is_named_is_loaded_in_place_of_the_other(folder: Path) -> None:
    async def act(played: Played) -> None:
        for name in ("one", "one", "two", "two", "one"):
            found = await played.models.ready(name)
            assert Path(found.params.path).stem == name
            loaded = [one.id for one in played.models.offered() if one.n_ctx is not None]
            assert loaded == [name]

    assert play(folder, act).loads == ["one.gguf", "two.gguf", "one.gguf"]


def test_another_model_waits_for_the_answers_of_the_loaded_one(folder: Path) -> None:
    async def act(played: Played) -> None:
        await played.models.ready("one")
        async with played.async_engine.events_of(
            [AnswerRequest((ChatMessage("user", "Endless"),))]
        ):
            other = asyncio.create_task(played.models.ready("two"))
            behind = asyncio.create_task(played.models.ready("one"))
            await asyncio.sleep(0.1)
            assert played.loads == ["one.gguf"]
            assert not other.done()
        found = await asyncio.gather(other, behind)
        assert [Path(one.params.path).stem for one in found] == ["two", "one"]

    assert play(folder, act).loads == ["one.gguf", "two.gguf", "one.gguf"]


def test_one_that_cannot_be_loaded_leaves_the_other_as_it_is(folder: Path) -> None:
    async def act(played: Played) -> None:
        await played.models.ready("one")
        (folder / "refuse").touch()
        with pytest.raises(Refusal, match="It does not fit") as told:
            await played.models.ready("two")
        assert told.value.status == 503
        assert Path((await played.models.ready("one")).params.path).stem == "one"
        (folder / "refuse").unlink()
        await played.models.ready("two")

    assert play(folder, act).loads == ["one.gguf", "two.gguf"]


def test_the_one_that_is_loaded_leaves_after_a_while(folder: Path) -> None:
    async def act(played: Played) -> None:
        await played.models.ready("one")
        await played.models.ready("two")
        while not any(isinstance(one, Unload) for one in played.host.commands):
            await asyncio.sleep(0.01)
        assert Path((await played.models.ready("two")).params.path).stem == "two"

    assert play(folder, act, keep_s=0.05).loads == ["one.gguf", "two.gguf", "two.gguf"]


def test_files_that_come_and_go_are_noticed(folder: Path) -> None:
    shelf = ModelShelf(lambda: sorted(folder.glob("*.gguf")))
    shelf.look()
    before = {one.id: one for one in shelf.models}
    (folder / "two.gguf").rename(folder / "three.gguf")
    shelf.look()
    after = {one.id: one for one in shelf.models}
    assert sorted(after) == ["one", "three"]
    assert after["one"] is before["one"]  # its header was not read again
