"""The addresses of servers and their models, which stand where a local model has its path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from app.core.system_keyring import Place, SecretStore
from app.core.translation import tr
from engine import EngineError, ModelInfo, one_line

LOCAL = {"127.0.0.1", "localhost", "::1"}
DEFAULT_PATH = "/v1"
ENDS = ("/chat/completions", "/completions", "/models")
"""Ends of addresses that people copy from examples."""

EXAMPLE = "http://192.168.0.7:11435"

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A server with OpenAI's interface, and one of its models.

    Attributes:
        url: address before "/chat/completions", such as "http://nas:11435/v1".
        model: name of the model there; "" for none.
    """

    url: str
    model: str = ""

    @property
    def path(self) -> str:
        """Text that stands for the model where others have a file's path."""
        return f"{self.url}#{quote(self.model, safe='/:@')}"

    @property
    def host(self) -> str:
        """Name of the server, with its port where that is not the scheme's own."""
        return one_line(urlsplit(self.url).netloc, 60)

    @property
    def name(self) -> str:
        """The model's name with that of its server."""
        return f"{one_line(self.model, 80)} – {self.host}"

    @property
    def root(self) -> str:
        """Address before "/metrics" and the like, which are no part of OpenAI's interface."""
        return self.url.removesuffix(DEFAULT_PATH)

    @property
    def is_in_the_open(self) -> bool:
        """Whether requests go to another machine without encryption."""
        split = urlsplit(self.url)
        return split.scheme == "http" and split.hostname not in LOCAL


def is_remote(path: str) -> bool:
    """Return whether what stands in the place of a path names a remote model."""
    return path.startswith(("http://", "https://"))


def split_path(path: str) -> RemoteAddress:
    """Return the address that a path names.

    Raises:
        EngineError: it cannot be used.
    """
    url, _, model = path.partition("#")
    return RemoteAddress(parse_url(url).url, unquote(model))


def short_name(path: str) -> str:
    """Return what a remote model is called where its path is shown."""
    try:
        return split_path(path).name
    except EngineError:
        return one_line(path, 80)


def model_caption(path: str) -> str:
    """Return what a model is called where only its path is known: its file, or its server."""
    return short_name(path) if is_remote(path) else Path(path).name


def parse_url(text: str) -> RemoteAddress:
    """Return the address of a server that a person has typed, such as "nas:11435".

    Raises:
        EngineError: it cannot be used.
    """
    typed = text.strip()
    whole = typed if "://" in typed else f"http://{typed}"
    try:
        split = urlsplit(whole)
        host, port = split.hostname, split.port
    except ValueError:
        raise _unusable(typed) from None
    is_plain = not (split.username or split.password or split.query or split.fragment)
    if split.scheme not in PORTS or not host or not is_plain or not whole.isprintable():
        raise _unusable(typed)
    if any(c in host for c in " \\<>\"'|^`{}"):
        raise _unusable(typed)
    shown = f"[{host}]" if ":" in host else host
    if port is not None and port != PORTS[split.scheme]:
        shown = f"{shown}:{port}"
    path = split.path.rstrip("/")
    for end in ENDS:
        path = path.removesuffix(end)
    return RemoteAddress(f"{split.scheme}://{shown}{path.rstrip('/') or DEFAULT_PATH}")


def remote_info(path: str, n_ctx: int = 0) -> ModelInfo:
    """Return what can be said of a remote model in the place of a file's header.

    Sizes are 0, names of formats empty: a server does not tell them.

    Args:
        n_ctx: its context in tokens; 0 where the server does not tell it.

    Raises:
        EngineError: the path names none.
    """
    return ModelInfo(
        path=path,
        name=split_path(path).name,
        architecture="unknown",
        supported=True,
        n_layer=0,
        n_embd=0,
        n_head=0,
        n_head_kv=0,
        n_vocab=0,
        n_ctx_train=n_ctx,
        n_params=0,
        n_bytes=0,
        quant="",
        has_chat_template=True,
        tensor_types=(),
    )


def _unusable(text: str) -> EngineError:
    shown = one_line(text.rpartition("@")[2], 80)  # what stands before an @ may be a password
    return EngineError(
        tr("“{url}” is no address of a server of models.").format(url=shown),
        tr("Enter one such as {url}.").format(url=EXAMPLE),
    )


MAX_KEY = 4096


class KeyStore:
    """Keys by the addresses of their servers.

    The keyring may ask the person to unlock it, so no method but `has` is for the GUI thread.

    Args:
        file: file of the servers that have keys, and of the keys that no keyring has.
    """

    def __init__(self, file: Path) -> None:
        self._secrets = SecretStore(file)

    def has(self, address: RemoteAddress) -> bool:
        """Return whether there is a key for a server."""
        return self._secrets.has(address.url)

    def get(self, address: RemoteAddress) -> str:
        """Return the key of a server; "" for none."""
        return self._secrets.get(address.url)

    def put(self, address: RemoteAddress, key: str) -> Place:
        """Keep the key of a server, or forget it for ""; return where it is kept.

        Raises:
            EngineError: it is no key.
        """
        return self._secrets.put(address.url, cleaned_key(key))


def cleaned_key(text: str) -> str:
    """Return a key as it is sent, without the spaces and line ends of a paste.

    Raises:
        EngineError: it is no key.
    """
    key = "".join(text.split())
    if len(key) > MAX_KEY or not (key.isascii() and key.isprintable()):
        raise EngineError(tr("This is no API key."), tr("Copy it again from where you got it."))
    return key
