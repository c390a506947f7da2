"""The one model of `tandem serve`: loaded, lost, given up, and loaded again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.paths import demo_model
from app.server.async_engine import AsyncEngine
from app.server.models import SingleModel, find_model
from app.server.refusal import Refusal
from engine import (
    AnswerRequest,
    EngineCrashed,
    EngineError,
    Failed,
    Load,
    LoadParams,
    TokenText,
    Unload,
)
from tests.helpers.fake_host import FakeHost, Script, model_info

Act = Callable[[SingleModel, AsyncEngine, FakeHost], Awaitable[None]]


def play(act: Act, script: Script | None = None, keep_s: float | None = None) -> FakeHost:
    """Do something with a model behind a scripted host, and return the host."""

    async def run() -> FakeHost:
        async_engine = AsyncEngine(
            lambda command: host.submit(command), lambda number: host.cancel(number)
        )
        async_engine.open()
        host = FakeHost(async_engine.on_event, script)
        params = LoadParams(str(demo_model()))
        models = SingleModel(async_engine, params, model_info(params.path), ("alias",), keep_s)
        try:
            await act(models, async_engine, host)
        finally:
            models.close()
            async_engine.close()
            host.close()
        return host

    return asyncio.run(run())


def n_loads(host: FakeHost) -> int:
    return sum(isinstance(command, Load) for command in host.commands)


@pytest.mark.parametrize("name", ["", "tandem-demo", "tandem-demo.gguf", "Tiny Chat", "alias"])
def test_a_model_has_several_names(name: str) -> None:
    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        assert find_model(models, name).id == "tandem-demo"
        assert find_model(models, name).n_ctx is None
        await models.load()
        assert find_model(models, name).n_ctx == 4096

    play(act)


def test_a_lost_model_is_loaded_again_once_for_all_who_wait() -> None:
    script = Script(answer_error=EngineCrashed("It has ended."), loses_model=True)

    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        await models.load()
        async with async_engine.events_of([AnswerRequest()]) as events:
            *_, (_, last) = [event async for event in events]
        assert isinstance(last, Failed)
        assert async_engine.model is None
        ready = await asyncio.gather(*(models.ready("") for _ in range(3)))
        assert ready == [async_engine.model] * 3
        assert async_engine.model is not None

    assert n_loads(play(act, script)) == 2


def test_a_model_that_cannot_be_loaded_again_is_told() -> None:
    script = Script(load_error=EngineError("The file is gone.", "Put it back."))

    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        with pytest.raises(Refusal, match="cannot be loaded: The file is gone") as caught:
            await models.ready("")
        assert (caught.value.status, caught.value.hint) == (503, "Put it back.")
        script.load_error = None
        assert await models.ready("") is async_engine.model

    play(act, script)


def test_a_lost_model_is_loaded_again_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that finds the server unwell sends it no request, so none would load the model."""
    monkeypatch.setattr("app.server.models.AGAIN_S", (0,))
    script = Script(answer_error=EngineCrashed("It has ended."), loses_model=True)

    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        async_engine.on_loss = models.restore
        await models.load()
        assert not models.problem()
        script.load_error = EngineCrashed("It has ended again.")
        async with async_engine.events_of([AnswerRequest()]) as events:
            assert isinstance([event async for _, event in events][-1], Failed)
        assert models.problem() == "The model is being reloaded."
        while n_loads(host) < 4:
            await asyncio.sleep(0.01)
        assert models.problem()
        with pytest.raises(Refusal, match="It has ended again") as caught:
            await models.ready("")
        assert caught.value.retry_after_s == 1, "it is tried again at once"
        script.load_error = None
        while models.problem():
            await asyncio.sleep(0.01)
        assert async_engine.model is not None

    play(act, script)


def test_a_model_that_nobody_asks_is_given_up_and_comes_back() -> None:
    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        await models.ready("")
        while async_engine.model is not None:
            await asyncio.sleep(0.01)
        assert isinstance(host.commands[-1], Unload)
        assert await models.ready("") is async_engine.model

    assert n_loads(play(act, keep_s=0.05)) == 2


def test_an_answer_keeps_the_model() -> None:
    script = Script(hold_after=1)

    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        await models.ready("")
        script.hold = True
        async with async_engine.events_of([AnswerRequest()]) as events:
            assert isinstance((await anext(events))[1], TokenText)
            await asyncio.sleep(0.2)
            assert async_engine.model is not None
        while async_engine.model is not None:
            await asyncio.sleep(0.01)

    play(act, script, keep_s=0.05)


def test_an_answer_that_nobody_reads_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events do not fill the memory."""
    monkeypatch.setattr("app.server.async_engine.MAX_UNREAD", 50)
    monkeypatch.setattr("app.server.async_engine.MAX_TOGETHER", 4)
    script = Script(answer="x" * 5000, chunk=1)

    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        await models.ready("")
        async with async_engine.events_of([AnswerRequest()]) as events:
            while not async_engine.is_idle:
                await asyncio.sleep(0.01)
            found = [event async for _, event in events]
        assert isinstance(found[-1], Failed)
        assert "did not read" in str(found[-1].error)
        assert len(found) == 51

    play(act, script)


def test_a_link_that_closes_fails_what_waits() -> None:
    async def act(models: SingleModel, async_engine: AsyncEngine, host: FakeHost) -> None:
        loading = asyncio.create_task(models.load())
        await asyncio.sleep(0)
        async_engine.close()
        with pytest.raises(Refusal, match="has been stopped") as caught:
            await loading
        assert caught.value.status == 503

    play(act, Script(hold=True))
