import pytest

from app.remote.client.address import (
    RemoteAddress,
    is_remote,
    parse_url,
    remote_info,
    short_name,
    split_path,
)
from engine import EngineError

TYPED = {
    "nas:11435": "http://nas:11435/v1",
    " http://NAS:11435/ ": "http://nas:11435/v1",
    "http://nas:80": "http://nas/v1",
    "https://api.example.com:443/v1": "https://api.example.com/v1",
    "https://openrouter.example/api/v1/": "https://openrouter.example/api/v1",
    "https://api.example.com/v1/chat/completions": "https://api.example.com/v1",
    "[::1]:8080": "http://[::1]:8080/v1",
}


@pytest.mark.parametrize(("typed", "url"), TYPED.items())
def test_what_is_typed_becomes_the_address_of_the_interface(typed: str, url: str) -> None:
    assert parse_url(typed).url == url


@pytest.mark.parametrize(
    "typed",
    ["", "ftp://nas", "http://", "http://me:secret@nas", "http://nas?key=1", "http://nas:99999",
     "http://na s", "http://nas/\x1b[2J", "http://[::1", "nas#model"],
)  # fmt: skip
def test_other_texts_are_refused_without_repeating_a_password(typed: str) -> None:
    with pytest.raises(EngineError, match="not a valid server address") as caught:
        parse_url(typed)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("model", ["small", "org/name:q4", "with # and % and ü", ""])
def test_a_path_names_server_and_model(model: str) -> None:
    address = RemoteAddress("https://nas/v1", model)
    assert is_remote(address.path)
    assert split_path(address.path) == address


def test_a_name_says_which_machine() -> None:
    path = RemoteAddress("http://nas:11435/v1", "small").path
    assert short_name(path) == remote_info(path).name == "small – nas:11435"
    assert not is_remote("/models/http.gguf")


def test_what_can_be_read_on_the_way_is_known() -> None:
    assert RemoteAddress("http://nas/v1").is_in_the_open
    assert not RemoteAddress("https://nas/v1").is_in_the_open
    assert not RemoteAddress("http://127.0.0.1:11435/v1").is_in_the_open
