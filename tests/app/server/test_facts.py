"""What a server tells of its model: what it can do, its recommended sampling, how full it is."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest
from openai import OpenAI

from app.remote.client.protocol import ServerFigures, parse_figures
from app.server.async_engine import AsyncEngine, CacheGauge
from app.server.models import capabilities_of
from app.server.openai.sampling import SamplingFields, sampled
from engine import (
    AnswerRequest,
    CacheCounted,
    Command,
    CountCache,
    EngineError,
    Failed,
    HostEvent,
    LoadParams,
    SamplingParams,
)
from engine.decoding.drafting.control import MAX_BETWEEN, DraftControl
from tests.helpers.fake_host import FakeHost, Script, model_info, model_loaded
from tests.helpers.prophet import always
from tests.helpers.served import EngineOnThread, Served

ENDLESS = {"prompt": "Go on", "stream": True, "max_tokens": -1, "ignore_eos": True}


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({"has_chat_template": False}, ["completion"]),
        ({}, ["completion", "tools"]),
        ({"can_think": True}, ["completion", "tools", "thinking"]),
        ({"has_thoughts": True}, ["completion", "tools", "thinking"]),
    ],
    ids=str,
)
def test_what_a_model_can_do_is_told_in_ollamas_words(
    facts: dict[str, object], wanted: list[str]
) -> None:
    assert capabilities_of(model_info(**facts)) == wanted  # type: ignore[arg-type]


def figures(client: httpx2.Client) -> ServerFigures:
    return parse_figures(client.get("/metrics").text)


def test_the_use_of_the_cache_is_told_while_answers_run(
    served: Served, http: httpx2.Client
) -> None:
    """In pages of 256 tokens; the window's monitor reads the same figures."""
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "on_overflow": "shift"}) as answer:
        lines = answer.iter_lines()  # kept: once it is collected, the client goes away
        assert next(filter(None, lines))
        found = figures(http)
        assert found.kv_room == 4096
        assert found.kv_used is not None
        assert found.kv_used in range(256, 1025, 256)
    while served.context.request_log.running:
        time.sleep(0.01)
    while figures(http).kv_used:
        time.sleep(0.01)
    kept = next(
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("tandem_kv_cache_kept_tokens ")
    )
    assert int(kept.split()[1]) > 0


class Gauged:
    """A gauge before an engine that answers as a test wants."""

    def __init__(self) -> None:
        self.asked: list[Command] = []
        self.cancelled: list[int] = []
        self.engine = AsyncEngine(self._submit, self.cancelled.append)
        self.engine.open()
        self.engine.model = model_loaded(LoadParams("/models/tiny.gguf"))
        self.gauge = CacheGauge(self.engine)

    def _submit(self, command: Command) -> int:
        self.asked.append(command)
        return len(self.asked)

    async def reply(self, event: CacheCounted | Failed) -> None:
        self.engine.on_event(HostEvent(len(self.asked), event))
        await asyncio.sleep(0.01)


def test_an_engine_that_is_busy_is_asked_once_and_keeps_nobody_waiting() -> None:
    async def act() -> None:
        gauged = Gauged()
        start = time.perf_counter()
        assert [await gauged.gauge.read() for _ in range(3)] == [None] * 3
        assert time.perf_counter() - start < 10
        assert gauged.asked == [CountCache()]
        await gauged.reply(CacheCounted(512, 256))
        assert await gauged.gauge.read() == CacheCounted(512, 256), "the last numbers"
        assert len(gauged.asked) == 2
        await gauged.reply(Failed(EngineError("Remote models do not support this.")))
        assert await gauged.gauge.read() is None
        assert len(gauged.asked) == 3
        gauged.engine.model = None
        assert await gauged.gauge.read() is None
        assert len(gauged.asked) == 3, "nobody is there to ask"
        gauged.engine.close()

    asyncio.run(act())


RECOMMENDED = {"first": (("temperature", 0.6), ("top_k", 20)), "second": (("temperature", 1.5),)}
"""What files recommend, by their names."""


@pytest.fixture
def recommending(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineOnThread]:
    """A scripted engine whose model's file recommends settings."""
    facts = model_info(sampling=RECOMMENDED["first"])
    monkeypatch.setattr("tests.helpers.fake_host.model_info", lambda path: facts)
    engine = EngineOnThread(lambda on_event: FakeHost(on_event, Script(answer="x")))
    yield engine
    engine.close()


def test_what_a_file_recommends_holds_where_nobody_says_otherwise(
    recommending: EngineOnThread,
) -> None:
    body = {"prompt": "x", "temperature": 0.9}
    with (
        Served(recommending, sampling=SamplingParams(top_k=7)) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        client.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
        usual = recommending.last_command().sampling
        client.post("/v1/completions", json=body).raise_for_status()
        asked = recommending.last_command().sampling
    assert (usual.temperature, usual.top_k) == (0.6, 7), "the server's own choice counts more"
    assert (asked.temperature, asked.top_k) == (0.9, 7)


def test_each_model_has_its_own_recommendations() -> None:
    """Those of the one that is loaded when the answer begins, not of the first one."""
    make = sampled(AnswerRequest(prompt="x"), SamplingFields(), SamplingParams(), None)
    found = {}
    for name, sampling in RECOMMENDED.items():
        loaded = model_loaded(LoadParams(f"/models/{name}.gguf"))
        (command,) = make(replace(loaded, info=model_info(sampling=sampling)))
        assert isinstance(command, AnswerRequest)
        found[name] = command.sampling.temperature, command.sampling.top_k
    assert found == {"first": (0.6, 20), "second": (1.5, SamplingParams().top_k)}


def test_right_guesses_are_counted(
    client: OpenAI, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked whether or not that pays with a model whose tokens take 0.3 ms.

    The answer is longer than the passes that a choice before it may still leave out.
    """
    control = always()
    monkeypatch.setattr(DraftControl, "choose", lambda _, proposals: control.choose(proposals))
    monkeypatch.setattr(DraftControl, "n_between_choices", lambda *_: 1)

    def counted() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        return {
            name: float(n)
            for name, _, n in (line.partition(" ") for line in lines)
            if n.removeprefix("-")[:1].isdigit()  # guesses may lose time
        }

    before = counted()
    done = client.completions.create(
        model="",
        prompt="The cat saw the dog. The dog ran home. " * 6,
        temperature=0,
        max_tokens=4 * MAX_BETWEEN,
        extra_body={"ignore_eos": True},
    )
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    assert details.rejected_prediction_tokens is not None
    after = counted()
    n = {name: after[name] - before[name] for name in after if "ed_tokens_total" in name}
    assert n["tandem_accepted_tokens_total"] == details.accepted_prediction_tokens
    assert after["tandem_decode_seconds_total"] > before["tandem_decode_seconds_total"]
    assert after["tandem_draft_saved_seconds"] != before["tandem_draft_saved_seconds"]
    n_wrong = n["tandem_drafted_tokens_total"] - n["tandem_accepted_tokens_total"]
    assert n_wrong == details.rejected_prediction_tokens
