"""Hub client, based on the hub's library; all errors are raised as `EngineError`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

import engine
from app.core.system_keyring import keep_secret, read_secret
from app.core.translation import tr, tr_later
from app.models.downloads.hub.offers import is_offline
from app.models.downloads.transfer.source import BUSY, Denied, RemoteFile, Source, TryLater
from engine import Cancelled, EngineError, one_line, package_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub import HfApi

log = logging.getLogger(__name__)

ANSWER_S = 15.0  # timeout for the next byte of a response, in seconds

MAX_FOUND = 50
MAX_FILES = 5000
SHA256 = 64
OFFLINE = tr_later("HF_HUB_OFFLINE is set, so Tandem does not use the network.")


@dataclass(frozen=True, slots=True)
class FoundRepo:
    """A search result.

    Attributes:
        n_downloads: downloads in the last 30 days.
        updated: time of the last change, if known.
        n_params: the model's parameter count; 0 if unknown.
        is_gated: whether its terms must be accepted first.
    """

    repo: str
    n_downloads: int
    n_likes: int
    updated: datetime | None
    n_params: int
    is_gated: bool


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository and its model files.

    Attributes:
        commit: commit from which the files are taken.
        licence: name of the licence, or "".
        page: address of its web page.
    """

    repo: str
    commit: str
    licence: str
    n_params: int
    is_gated: bool
    files: tuple[RemoteFile, ...]
    page: str


class Hub:
    """Search and metadata for one hub; `token` returns the user's token, or ""."""

    def __init__(self, endpoint: str, token: Callable[[], str]) -> None:
        self.endpoint, self._token = endpoint, token

    def search(self, words: str) -> list[FoundRepo]:
        """Search for repositories with GGUF models; return the most downloaded first.

        Raises:
            EngineError: the request failed.
        """
        with _sentences(words):
            models = self._api().list_models(
                filter="gguf", search=words, sort="downloads", limit=MAX_FOUND,
                expand=["downloads", "likes", "lastModified", "gated", "gguf"],
            )  # fmt: skip
            return [
                FoundRepo(
                    str(model.id),
                    int(model.downloads or 0),
                    int(model.likes or 0),
                    model.last_modified,
                    _n_params(model.gguf),
                    bool(model.gated),
                )
                for model in models
            ]

    def repository(self, repo: str, revision: str = "") -> Repository:
        """Return a repository's current model files, or those at `revision`.

        Raises:
            EngineError: the repository does not exist, or the request failed.
        """
        with _sentences(repo):
            info = self._api().model_info(
                repo, revision=revision or None, files_metadata=True, timeout=ANSWER_S
            )
            name, commit = str(info.id), str(info.sha or "")
            files = tuple(
                self._file(name, commit, sibling)
                for sibling in (info.siblings or ())[:MAX_FILES]
                if str(sibling.rfilename).lower().endswith(".gguf")
            )
            licence = _licence(info)
            return Repository(
                name, commit, licence, _n_params(info.gguf), bool(info.gated), files,
                f"{self.endpoint}/{quote(name)}",
            )  # fmt: skip

    def _file(self, repo: str, commit: str, sibling: Any) -> RemoteFile:
        name = str(sibling.rfilename)
        lfs = sibling.lfs
        sha256 = str(lfs.sha256) if lfs is not None else ""
        size = int(lfs.size if lfs is not None else sibling.size or 0)
        url = f"{self.endpoint}/{quote(repo)}/resolve/{quote(commit, '')}/{quote(name)}"
        is_hash = len(sha256) == SHA256 and set(sha256) <= set("0123456789abcdef")
        return RemoteFile(url, name, size, sha256 if is_hash else "", repo, commit)

    def _api(self) -> HfApi:
        check_online()
        import huggingface_hub  # imported here because it takes half a second
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        huggingface_hub.set_client_factory(lambda: _Client(self.endpoint))
        return huggingface_hub.HfApi(
            endpoint=self.endpoint,
            token=self._token() or False,
            library_name="tandem",
            library_version=package_version(),
        )


def check_online() -> None:
    """Raise `EngineError` if environment variables forbid network access."""
    if is_offline():
        raise _offline_error()


def _offline_error() -> EngineError:
    return EngineError(tr(OFFLINE), tr("Unset it and restart Tandem."))


def machine_token() -> str:
    """Return the token that Hugging Face's tools use on this machine, or ""."""
    import huggingface_hub

    try:
        return huggingface_hub.get_token() or ""
    except (OSError, ValueError, httpx2.HTTPError):
        return ""


class _Client(httpx2.Client):
    """HTTP client with timeouts and no retries; sends the token only to the hub."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(follow_redirects=True)
        self._origin = _origin(httpx2.URL(endpoint))

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        request.extensions["timeout"] = httpx2.Timeout(ANSWER_S).as_dict()
        if _origin(request.url) != self._origin:
            request.headers.pop("authorization", None)
        host = one_line(request.url.host, 60)
        try:
            response = super().send(request, **options)
        except httpx2.TimeoutException:
            raise EngineError(
                tr("{host} does not respond.").format(host=host), tr("Try again later.")
            ) from None
        except httpx2.TransportError:
            raise EngineError(
                tr("{host} cannot be reached.").format(host=host),
                tr("Check your internet connection."),
            ) from None
        if response.status_code in BUSY:
            raise EngineError(
                tr("{host} is busy (status {status}).").format(
                    host=host, status=response.status_code
                ),
                tr("Try again in a minute."),
            )
        return response


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """Turn the library's errors into `EngineError`."""
    from huggingface_hub import errors

    shown = one_line(what, 80)
    try:
        yield
    except errors.GatedRepoError:
        raise Denied(
            tr("{name} is gated: you have to accept its conditions first.").format(name=shown),
            tr("Accept them on the model's page, then enter your token here."),
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise _no_repository(shown) from None
    except errors.HFValidationError:
        raise EngineError(
            tr("“{name}” is not a repository name.").format(name=shown), tr("Use owner/name.")
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _offline_error() from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 404:
            raise _no_repository(shown) from None
        if status in (401, 403):
            raise Denied(tr("The hub rejected your token."), tr("Enter another one.")) from None
        raise EngineError(
            tr("The hub returned error {status}.").format(status=status), tr("Try again later.")
        ) from None
    except httpx2.InvalidURL:
        raise EngineError(tr("The address in HF_ENDPOINT is not valid.")) from None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        log.info("the hub's response about %s is not valid", shown)
        raise EngineError(tr("The hub sent an invalid response."), tr("Try again later.")) from None


def _no_repository(shown: str) -> EngineError:
    return EngineError(
        tr("There is no repository {name}.").format(name=shown),
        tr("Check the name; private repositories need a token."),
    )


def _n_params(gguf: object) -> int:
    total = gguf.get("total") if isinstance(gguf, dict) else None
    return total if isinstance(total, int) and total > 0 else 0


def _licence(info: Any) -> str:
    named = getattr(info.card_data, "license", None)
    if isinstance(named, list):
        named = ", ".join(map(str, named))
    if not named:
        tags = (str(tag) for tag in info.tags or ())
        named = next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "")
    if named == "other":
        named = getattr(info.card_data, "license_name", None) or named
    return one_line(str(named), 60)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


FIRST_BYTES = 1 << 20
MAX_BYTES = 64 << 20
MAX_PARTS = 32  # maximum number of parts; each header takes at least one request


def fetch_header(
    source: Source,
    parts: Sequence[RemoteFile],
    folder: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Path:
    """Write the headers of a model's parts to sparse files in an empty folder.

    Returns:
        Path of the first file.

    Raises:
        EngineError: a header cannot be fetched or is invalid.
    """
    if len(parts) > MAX_PARTS:
        raise EngineError(tr("The model has {n} files, too many to check.").format(n=len(parts)))
    paths = []
    for number, part in enumerate(parts, 1):
        path = folder / f"model-{number:05}-of-{len(parts):05}.gguf"
        data = _first_bytes(source, part, is_stopped)
        try:
            with path.open("wb") as file:
                file.write(data)
                file.truncate(part.n_bytes)  # the hole takes no disk space
        except OSError as error:
            why = error.strerror or error
            raise EngineError(tr("The header cannot be written: {why}.").format(why=why)) from None
        paths.append(path)
    return paths[0]


def _first_bytes(source: Source, file: RemoteFile, is_stopped: Callable[[], bool]) -> bytes:
    """Return the start of a file, including its whole header."""
    data, wanted = bytearray(), FIRST_BYTES
    while True:
        wanted = min(wanted, file.n_bytes, MAX_BYTES)
        _extend(source, file, data, wanted, is_stopped)
        if engine.is_header_whole(data, file.n_bytes):
            return bytes(data)
        if wanted >= min(file.n_bytes, MAX_BYTES):
            raise EngineError(tr("The model's header is too long or damaged."))
        wanted *= 2


def _extend(
    source: Source, file: RemoteFile, data: bytearray, wanted: int, is_stopped: Callable[[], bool]
) -> None:
    """Fetch bytes until `data` has `wanted` bytes.

    Raises:
        EngineError: the bytes cannot be fetched.
    """
    try:
        with source.open(file, len(data), wanted) as answer:
            if answer.is_whole:
                data.clear()
            for chunk in answer.chunks:
                data += chunk
                if is_stopped():
                    raise Cancelled("Checking the model")
                if len(data) >= wanted:
                    break
    except TryLater as failure:
        raise EngineError(str(failure), tr("Try again.")) from None
    del data[wanted:]
    if len(data) < wanted:
        raise EngineError(tr("The connection was lost."), tr("Try again."))


class TokenStore:
    """The token from the keyring, or else the token that Hugging Face's tools use.

    The keyring may show an unlock prompt, so do not call these methods on the GUI thread.

    Args:
        endpoint: address of the hub that the token is for.
        other: returns the token that Hugging Face's tools use, or "".
    """

    def __init__(self, endpoint: str, other: Callable[[], str]) -> None:
        self._endpoint, self._other = endpoint, other
        self._lock = threading.Lock()
        self._mine: str | None = None  # None: not read yet

    def get(self) -> str:
        """Return the token, or ""."""
        with self._lock:
            if self._mine is None:
                self._mine = read_secret(self._endpoint)
            return self._mine or self._other()

    def put(self, token: str) -> bool:
        """Use another token ("" for none); return whether the keyring was updated.

        If there is no keyring, the token is kept in memory until the program exits.
        """
        with self._lock:
            self._mine = "".join(token.split())
            return keep_secret(self._endpoint, self._mine)
