"""Addresses of servers and of remote models, used instead of model paths."""

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
"""Endpoints that are stripped from copied URLs."""

EXAMPLE = "http://192.168.0.7:11435"

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """An OpenAI-compatible server and one of its models.

    Attributes:
        url: base URL such as "http://nas:11435/v1", without "/chat/completions".
        model: name of the model, or "".
    """

    url: str
    model: str = ""

    @property
    def path(self) -> str:
        """The model's address, used instead of a file path."""
        return f"{self.url}#{quote(self.model, safe='/:@')}"

    @property
    def host(self) -> str:
        """Host name of the server, with the port unless it is the default."""
        return one_line(urlsplit(self.url).netloc, 60)

    @property
    def name(self) -> str:
        """Display name: the model and the server."""
        return f"{one_line(self.model, 80)} – {self.host}"

    @property
    def root(self) -> str:
        """Base URL for "/metrics" and other endpoints outside OpenAI's API."""
        return self.url.removesuffix(DEFAULT_PATH)

    @property
    def is_in_the_open(self) -> bool:
        """Whether requests go to another machine unencrypted."""
        split = urlsplit(self.url)
        return split.scheme == "http" and split.hostname not in LOCAL


def is_remote(path: str) -> bool:
    """Return whether a model path is a remote model's address."""
    return path.startswith(("http://", "https://"))


def split_path(path: str) -> RemoteAddress:
    """Parse a remote model's address.

    Raises:
        EngineError: the address is invalid.
    """
    url, _, model = path.partition("#")
    return RemoteAddress(parse_url(url).url, unquote(model))


def short_name(path: str) -> str:
    """Return the display name for a remote model's address."""
    try:
        return split_path(path).name
    except EngineError:
        return one_line(path, 80)


def model_caption(path: str) -> str:
    """Return the display name for a model path: the file name, or model and server."""
    return short_name(path) if is_remote(path) else Path(path).name


def parse_url(text: str) -> RemoteAddress:
    """Parse a server address as a user types it, such as "nas:11435".

    Raises:
        EngineError: the address is invalid.
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
    """Return a placeholder header for a remote model; unknown sizes are 0.

    Args:
        n_ctx: its context length; 0 if unknown.

    Raises:
        EngineError: the address is invalid.
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
    shown = one_line(text.rpartition("@")[2], 80)  # a password may precede the @
    return EngineError(
        tr("“{url}” is not a valid server address.").format(url=shown),
        tr("Use an address like {url}.").format(url=EXAMPLE),
    )


MAX_KEY = 4096


class KeyStore:
    """API keys by server.

    Only `has` may be called on the GUI thread, since the keyring may ask the user to unlock it.

    Args:
        file: see `SecretStore`.
    """

    def __init__(self, file: Path) -> None:
        self._secrets = SecretStore(file)

    def has(self, address: RemoteAddress) -> bool:
        return self._secrets.has(address.url)

    def get(self, address: RemoteAddress) -> str:
        """Return a server's key, or ""."""
        return self._secrets.get(address.url)

    def put(self, address: RemoteAddress, key: str) -> Place:
        """Store a server's key, or delete it if `key` is ""; return where it is stored.

        Raises:
            EngineError: the key is invalid.
        """
        return self._secrets.put(address.url, cleaned_key(key))


def cleaned_key(text: str) -> str:
    """Return a pasted key without spaces or line breaks.

    Raises:
        EngineError: the key is invalid.
    """
    key = "".join(text.split())
    if len(key) > MAX_KEY or not (key.isascii() and key.isprintable()):
        raise EngineError(tr("This is not an API key."), tr("Copy it again from its source."))
    return key
