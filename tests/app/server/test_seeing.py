"""A model that sees behind a server: the same picture by all protocols."""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from app.remote.client.protocol import _model
from tests.helpers.held_pictures import HeldPictures
from tests.helpers.hf_models.seeing import SEEING, SeeingFamily
from tests.helpers.pictures import as_file, random_picture
from tests.helpers.served import EngineOnThread, Served

DATA = b64encode(as_file(random_picture(90, 60), "JPEG")).decode()
ADDRESS = f"data:image/jpeg;base64,{DATA}"
QUICK = ("gemma3",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=[] if family.name in QUICK else pytest.mark.slow)
        for family in SEEING
    ],
    ids=lambda family: family.name,
)
def eyes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    family: SeeingFamily = request.param
    folder: Path = tmp_path_factory.mktemp(family.name)
    family.build(folder)
    engine = EngineOnThread(model=folder / "model.gguf", n_ctx=512)
    try:
        with (
            Served(engine, has_ollama=True) as server,
            httpx2.Client(base_url=server.address, timeout=60, trust_env=False) as client,
        ):
            yield client
    finally:
        engine.close()


def test_a_picture_takes_as_many_tokens_by_every_protocol(eyes: httpx2.Client) -> None:
    """Each asks with the picture before the text."""
    shown = {"type": "image_url", "image_url": {"url": ADDRESS}}
    asked = {"role": "user", "content": [shown, {"type": "text", "text": "hello"}]}
    chat = {"messages": [asked], "max_tokens": 4, "temperature": 0}
    parts = [{"type": "input_image", "image_url": ADDRESS}, {"type": "input_text", "text": "hello"}]
    source = {"type": "base64", "media_type": "image/jpeg", "data": DATA}
    found = [
        eyes.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"],
        eyes.post(
            "/v1/responses",
            json={"input": [{"role": "user", "content": parts}], "max_output_tokens": 16},
        ).json()["usage"]["input_tokens"],
        eyes.post(
            "/v1/messages",
            json={
                "model": "model", "max_tokens": 4,
                "messages": [{"role": "user", "content": [
                    {"type": "image", "source": source}, {"type": "text", "text": "hello"},
                ]}],
            },
        ).json()["usage"],
        eyes.post(
            "/api/chat",
            json={
                "model": "model", "stream": False, "options": {"num_predict": 4},
                "messages": [{"role": "user", "content": "hello", "images": [DATA]}],
            },
        ).json()["prompt_eval_count"],
    ]  # fmt: skip
    usage = found[2]
    found[2] = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    blind = eyes.post(
        "/v1/chat/completions", json=chat | {"messages": [{"role": "user", "content": "hello"}]}
    ).json()["usage"]["prompt_tokens"]
    assert len(set(found)) == 1, found
    assert found[0] > blind + 4


def test_a_picture_that_cannot_be_read_is_told(eyes: httpx2.Client) -> None:
    broken = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{DATA[:400]}"}}
    reply = eyes.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": [broken]}]}
    )
    assert reply.status_code == 400
    assert "An image cannot be used: it is damaged" in reply.json()["error"]["message"]


def test_the_list_of_models_tells_how_many_tokens_pictures_take(eyes: httpx2.Client) -> None:
    """The window counts by it when the model runs behind a server."""
    (listed,) = eyes.get("/v1/models").json()["data"]
    assert "vision" in listed["capabilities"]
    found = _model(listed)
    assert found is not None
    assert found.vision is not None
    count = {"model": "model", "messages": [{"role": "user", "content": "hello"}]}
    without = eyes.post("/v1/messages/count_tokens", json=count).json()["input_tokens"]
    source = {"type": "base64", "media_type": "image/jpeg", "data": DATA}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "hello"}]
    count["messages"] = [{"role": "user", "content": parts}]
    with_picture = eyes.post("/v1/messages/count_tokens", json=count).json()["input_tokens"]
    n = found.vision.n_tokens(90, 60)
    assert n <= with_picture - without <= n + 80, "its tokens, and texts around it"
    assert _model({**listed, "owned_by": "somebody"}) == replace(
        found, is_tandem=False, vision=None
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_a_client_that_goes_ends_the_reading_of_its_pictures_within_a_second(
    eyes: httpx2.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held = HeldPictures(monkeypatch)
    data = b64encode(as_file(random_picture(70, 60, seed=len(path)))).decode()
    shown: dict[str, object] = {
        "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data},
    }  # fmt: skip
    if "chat" in path:
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    body = {"model": "model", "messages": [{"role": "user", "content": [shown]}]}
    blind = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with pytest.raises(httpx2.ReadTimeout):
        eyes.post(path, json=body, timeout=0.5)
    assert held.begun.wait(20)
    assert held.cancelled.wait(1)
    assert eyes.post("/v1/chat/completions", json=blind).status_code == 200
