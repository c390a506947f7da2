"""Connections to download servers: ranges, redirects, and where the token may be sent."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from app.core.paths import is_device_name
from app.core.translation import tr
from engine import Cancelled, EngineError, one_line, package_version

MAX_NAME = 200  # maximum bytes per name; file systems allow 255, and downloads add a suffix

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"/\\|?*\u200e\u200f\u202a-\u202e\u2066-\u2069]')
"""Characters that are special in paths, invalid on Windows, or alter how a name is displayed."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a server.

    Attributes:
        url: address that contains no secrets.
        name: path in the repository, with "/" between folders; never used as a local path.
        sha256: hexadecimal checksum; "" if unknown.
        repo: repository as "owner/name", or the host for a plain link.
        commit: the repository's commit, or "".
    """

    url: str
    name: str
    n_bytes: int
    sha256: str = ""
    repo: str = ""
    commit: str = ""

    def is_same(self, other: RemoteFile) -> bool:
        """Return whether both have the same content according to the server."""
        if self.sha256 and other.sha256:
            return (self.sha256, self.n_bytes) == (other.sha256, other.n_bytes)
        mine, others = (
            (file.repo, file.commit, file.name, file.n_bytes, file.sha256) for file in (self, other)
        )
        return mine == others


def safe_name(name: str) -> str:
    """Normalize a name from the network; check that it is a valid file name on all systems.

    Raises:
        EngineError: the name is invalid.
    """
    name = unicodedata.normalize("NFC", name)
    is_bad = (
        not name.strip(". ")
        or name != name.strip()
        or name.endswith(".")
        or name.startswith(".")
        or FORBIDDEN.search(name) is not None
        or is_device_name(name)
        or len(name.encode(errors="replace")) > MAX_NAME
    )
    if is_bad or not _is_text(name):
        raise EngineError(
            tr("“{name}” is not a valid file name.").format(name=one_line(name, 80)),
            tr("Nothing was downloaded. Report this to the model's publisher."),
        )
    return name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def destination(folder: Path, publisher: str, model: str, name: str) -> Path:
    """Return the path for a file in a models folder: "publisher/model/file.gguf".

    Raises:
        EngineError: a name is invalid, or the file is not a model.
    """
    if not name.lower().endswith(".gguf"):
        raise EngineError(
            tr("“{name}” is not a .gguf file.").format(name=one_line(name, 80)),
            tr("Choose a file ending in .gguf."),
        )
    return folder / safe_name(publisher) / safe_name(model) / safe_name(name)


def file_names(paths: list[str]) -> dict[str, str]:
    """Return a unique file name for each path in a repository: its last part if that is unique.

    A model and its helpers are saved in one folder. Names that differ only in case refer to the
    same file on Windows and macOS, so a number is added to the later ones.
    """
    last = [path.rpartition("/")[2] for path in paths]
    keys = [_key(name) for name in last]
    names, taken = dict[str, str](), set[str]()
    for path, name in zip(paths, last, strict=True):
        given = made = name if keys.count(_key(name)) == 1 else path.replace("/", "-")
        number = 1
        while _key(given) in taken:
            number += 1
            stem, dot, suffix = made.rpartition(".")
            given = f"{stem}-{number}{dot}{suffix}"
        taken.add(_key(given))
        names[path] = given
    return names


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


CONNECT_S = 10.0
STALL_S = 20.0  # timeout for the next byte, in seconds

MAX_HOPS = 8
MAX_WAIT_S = 120.0
EXPIRED = {400, 401, 403, 404, 410}  # status codes if a cached address may have expired

BUSY = {408, 425, 429, 500, 502, 503, 504}
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
LOCAL = {"127.0.0.1", "localhost", "::1"}

for _name in ("httpx2", "httpcore2"):  # these log URLs, which may be signed
    logging.getLogger(_name).setLevel(logging.WARNING)


class TryLater(Exception):
    """Temporary failure, with a sentence to show if it persists.

    Args:
        wait_s: seconds to wait according to the server; 0 if it gave no time.
    """

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Denied(EngineError):
    """Error raised if a file requires a token, or its terms must be accepted."""


class FileChanged(EngineError):
    """Error raised if a file has changed on the server."""


@dataclass(slots=True)
class RangeAnswer:
    """The bytes in a range, or the whole file if the server ignored the range."""

    start: int
    is_whole: bool
    chunks: Iterator[bytes]


class Source:
    """Connections to one hub and its redirects; thread-safe.

    Args:
        endpoint: address of the hub; the token is sent nowhere else.
        token: returns the token, or "".
        stall_s: timeout for the next byte, in seconds.
    """

    def __init__(
        self, endpoint: str, token: Callable[[], str] = lambda: "", stall_s: float = STALL_S
    ) -> None:
        self._endpoint, self._token = httpx2.URL(endpoint), token
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(stall_s, connect=min(CONNECT_S, stall_s)),
            headers={"User-Agent": f"tandem/{package_version()}", "Accept-Encoding": "identity"},
        )
        self._found: dict[str, httpx2.URL] = {}
        self._is_closed = False

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self._client.close()

    @contextmanager
    def open(self, file: RemoteFile, start: int, end: int) -> Iterator[RangeAnswer]:
        """Request bytes `start` to `end` (exclusive) from a file.

        Raises:
            TryLater: the connection failed, or the server is busy.
            Denied: a token is missing or insufficient.
            FileChanged: the file's size or hash has changed.
            EngineError: the file does not exist, or the server cannot be used.
        """
        with self._response(file.url, start, end) as response:
            yield _checked(response, file, start)

    def size_of(self, url: str) -> tuple[int, str]:
        """Return a file's size in bytes and its ETag ("" if it has none).

        Raises:
            TryLater: see `open`.
            EngineError: the file does not exist, or its size is unknown.
        """
        with self._response(url, 0, 1) as response:
            _check_status(response)
            size = _whole_size(response)
            mark = response.headers.get("etag", "")
        if size is None:
            raise EngineError(tr("The server does not report the size of this file."))
        return size, mark

    @contextmanager
    def _response(self, url: str, start: int, end: int) -> Iterator[httpx2.Response]:
        try:
            response = self._request(url, start, end)
            try:
                yield response
            finally:
                response.close()
        except httpx2.InvalidURL:
            raise EngineError(
                tr("“{url}” is not a valid address.").format(url=one_line(url, 80))
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryLater(_reason(error)) from None

    def _request(self, url: str, start: int, end: int) -> httpx2.Response:
        """Send a request to the address that a URL redirects to, cached if possible."""
        known = self._found.get(url)
        if known is not None:
            response = self._send(known, start, end)
            if response.status_code not in EXPIRED and not response.has_redirect_location:
                return response
            response.close()
            self._found.pop(url, None)
        at = httpx2.URL(url)
        for _ in range(MAX_HOPS):
            response = self._send(at, start, end)
            if not response.has_redirect_location:
                if at != url and response.status_code in (200, 206):
                    self._found[url] = at
                return response
            response.close()
            at = redirect_target(at, response)
        raise EngineError(tr("The server redirects too many times."), tr("Try again later."))

    def _send(self, at: httpx2.URL, start: int, end: int) -> httpx2.Response:
        if self._is_closed:
            raise Cancelled("The download")
        if at.scheme not in ("http", "https") or not at.host or at.userinfo:
            shown = one_line(str(at.copy_with(query=None)), 80)
            raise EngineError(tr("“{url}” cannot be used.").format(url=shown))
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._is_of_hub(at) and (token := self._token()):
            headers["Authorization"] = f"Bearer {token}"
        request = self._client.build_request("GET", at, headers=headers)
        return self._client.send(request, stream=True, follow_redirects=False)

    def _is_of_hub(self, at: httpx2.URL) -> bool:
        """Return whether the token may be sent: only to the hub, and only encrypted."""
        hub = self._endpoint
        is_private = at.scheme == "https" or at.host in LOCAL
        return is_private and (at.scheme, at.host, at.port) == (hub.scheme, hub.host, hub.port)


def redirect_target(at: httpx2.URL, response: httpx2.Response) -> httpx2.URL:
    """Return a redirect's target.

    Raises:
        EngineError: the target is not encrypted although the source is.
    """
    target = at.join(response.headers["location"])
    if at.scheme == "https" and target.scheme != "https":
        raise EngineError(tr("The server redirects to an unencrypted address."))
    return target


def _checked(response: httpx2.Response, file: RemoteFile, start: int) -> RangeAnswer:
    if response.status_code in EXPIRED and response.request.url != file.url:
        raise TryLater(tr("The download address from the hub does not work."))
    _check_status(response)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TryLater(tr("The server sent the file in an unexpected encoding."))
    size = _whole_size(response)
    mark = "" if file.sha256 else response.headers.get("etag", "")
    if size not in (None, file.n_bytes) or (mark and file.commit and mark != file.commit):
        raise _changed(file)
    chunks = response.iter_raw()
    if response.status_code == 200:
        return RangeAnswer(0, True, chunks)
    match = RANGE.fullmatch(response.headers.get("content-range", ""))
    if match is None or int(match[1]) != start:
        raise TryLater(tr("The server sent the wrong part of the file."))
    return RangeAnswer(start, False, chunks)


def _whole_size(response: httpx2.Response) -> int | None:
    if response.status_code == 206:
        match = RANGE.fullmatch(response.headers.get("content-range", ""))
        return int(match[3]) if match and match[3] != "*" else None
    length = response.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"\d{1,18}", length, re.ASCII) else None


def _check_status(response: httpx2.Response) -> None:
    status, host = response.status_code, one_line(response.request.url.host, 60)
    if status in (200, 206):
        return
    if status in (401, 403):
        raise _denial(response)
    if status in (404, 410):
        raise EngineError(
            tr("{host} no longer has this file.").format(host=host),
            tr("Search for the model again."),
        )
    if status == 416:
        raise FileChanged(
            tr("The file on the server is shorter now."), tr("Search for the model again.")
        )
    if status in BUSY:
        after = response.headers.get("retry-after", "")
        wait_s = min(float(after), MAX_WAIT_S) if after.isdecimal() else 0.0
        limited, failed = tr("{host} is limiting requests."), tr("{host} returned error {status}.")
        why = limited if status == 429 else failed
        raise TryLater(why.format(host=host, status=status), wait_s)
    raise EngineError(
        tr("{host} returned error {status}.").format(host=host, status=status),
        tr("Try again later."),
    )


def _denial(response: httpx2.Response) -> EngineError:
    host = one_line(response.request.url.host, 60)
    if response.headers.get("x-error-code") == "GatedRepo":
        return Denied(
            tr("This model is gated: you have to accept its conditions first."),
            tr("Accept them on the model's page, then enter your token here."),
        )
    if "authorization" in response.request.headers:
        return Denied(
            tr("Your token cannot access this file on {host}.").format(host=host),
            tr("Check the token, and whether your account has access to the model."),
        )
    return Denied(
        tr("{host} requires a token for this file.").format(host=host),
        tr("Enter your token. If the model is gated, accept its conditions, too."),
    )


def _changed(file: RemoteFile) -> FileChanged:
    name = one_line(file.name.rpartition("/")[2], 80)
    return FileChanged(
        tr("{name} has changed on the server since you chose it.").format(name=name),
        tr("The partial download was deleted. Search for the model again."),
    )


def _reason(error: Exception) -> str:
    """Return why a connection failed, omitting the URL, which may be signed."""
    if isinstance(error, httpx2.TimeoutException):
        return tr("The server does not respond.")
    if isinstance(error, httpx2.ConnectError):
        return tr("The server cannot be reached.")
    return tr("The connection was lost.")
