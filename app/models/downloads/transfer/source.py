"""Connections to servers of models: ranges of files, redirects, and where the token may go."""

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

MAX_NAME = 200
"""Most bytes of a name; file systems allow 255, and the downloader appends to it."""

FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"/\\|?*\u200e\u200f\u202a-\u202e\u2066-\u2069]')
"""Characters that a path gives a meaning, that Windows refuses, or that make a name look other."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its server describes it.

    Attributes:
        url: address without secrets.
        name: path in the repository, with "/" between folders; never used as a path here.
        n_bytes: size.
        sha256: hash of its bytes in hexadecimal; "" where the server gives none.
        repo: repository, as "owner/name", or the host of a plain link.
        commit: state of the repository; "" where there is none.
    """

    url: str
    name: str
    n_bytes: int
    sha256: str = ""
    repo: str = ""
    commit: str = ""

    def is_same(self, other: RemoteFile) -> bool:
        """Return whether both have the same bytes, as far as servers tell."""
        if self.sha256 and other.sha256:
            return (self.sha256, self.n_bytes) == (other.sha256, other.n_bytes)
        mine, others = (
            (file.repo, file.commit, file.name, file.n_bytes, file.sha256) for file in (self, other)
        )
        return mine == others


def safe_name(name: str) -> str:
    """Return a name from the network if it can only be the name of one file or folder.

    Raises:
        EngineError: it could be something else, here or on another system.
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
            tr("The name “{name}” cannot be used for a file.").format(name=one_line(name, 80)),
            tr("Nothing was downloaded. Tell whoever published the model."),
        )
    return name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def destination(folder: Path, publisher: str, model: str, name: str) -> Path:
    """Return the path of a file as "publisher/model/file.gguf" in a folder of models.

    Raises:
        EngineError: a name could lead elsewhere, or the file is no model.
    """
    if not name.lower().endswith(".gguf"):
        raise EngineError(
            tr("“{name}” is not a .gguf file.").format(name=one_line(name, 80)),
            tr("Pick a file that ends in .gguf."),
        )
    return folder / safe_name(publisher) / safe_name(model) / safe_name(name)


def file_names(paths: list[str]) -> dict[str, str]:
    """Return a file name for each path of a repository: its last part, if no other has the same.

    A model and its helpers lie in one folder here, whatever folders they had there. Names that
    differ by case alone are one file on Windows and macOS, so the later ones get a number.
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
STALL_S = 20.0
"""Seconds without a byte after which a connection is given up."""

MAX_HOPS = 8
MAX_WAIT_S = 120.0
EXPIRED = {400, 401, 403, 404, 410}
"""Answers of a remembered address that has lost its validity."""

BUSY = {408, 425, 429, 500, 502, 503, 504}
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
LOCAL = {"127.0.0.1", "localhost", "::1"}

for _name in ("httpx2", "httpcore2"):  # they log addresses, which may be signed
    logging.getLogger(_name).setLevel(logging.WARNING)


class TryLater(Exception):
    """Failure that may pass by itself.

    Args:
        why: sentence for the person, if it does not.
        wait_s: seconds that the server asks to wait; 0 for none.
    """

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Denied(EngineError):
    """Error of a file that needs an account, or the consent of whoever published it."""


class FileChanged(EngineError):
    """Error of a file that is not what its server has announced before."""


@dataclass(slots=True)
class RangeAnswer:
    """The bytes of a range, or of the whole file where the server ignores ranges.

    Attributes:
        start: place of the first byte.
        is_whole: whether the server has ignored the range.
        chunks: the bytes, as they arrive.
    """

    start: int
    is_whole: bool
    chunks: Iterator[bytes]


class Source:
    """Connections to one hub and to where it redirects; usable by several threads.

    Args:
        endpoint: address of the hub; the token goes nowhere else.
        token: returns the token; "" for none.
        stall_s: seconds without a byte after which a request fails.
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
        """End all connections."""
        self._is_closed = True
        self._client.close()

    @contextmanager
    def open(self, file: RemoteFile, start: int, end: int) -> Iterator[RangeAnswer]:
        """Ask for the bytes from `start` to `end` of a file.

        Raises:
            TryLater: the connection fails, or the server is busy.
            Denied: the file needs a token, or another one.
            FileChanged: the file has another size or hash by now.
            EngineError: there is no such file, or the server cannot be used.
        """
        try:
            response = self._request(file.url, start, end)
            try:
                yield _checked(response, file, start)
            finally:
                response.close()
        except httpx2.InvalidURL:
            raise EngineError(
                tr("“{url}” is no usable address.").format(url=one_line(file.url, 80))
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryLater(_reason(error)) from None

    def size_of(self, url: str) -> tuple[int, str]:
        """Return the size in bytes of a file and what marks its present state ("" for nothing).

        Raises:
            TryLater: as for `open`.
            EngineError: there is no such file, or its size is not told.
        """
        try:
            response = self._request(url, 0, 1)
            try:
                _check_status(response)
                size = _whole_size(response)
                mark = response.headers.get("etag", "")
            finally:
                response.close()
        except httpx2.InvalidURL:
            raise EngineError(
                tr("“{url}” is no usable address.").format(url=one_line(url, 80))
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TryLater(_reason(error)) from None
        if size is None:
            raise EngineError(tr("The server does not say how large this file is."))
        return size, mark

    def _request(self, url: str, start: int, end: int) -> httpx2.Response:
        """Send a request to the address that was found last, or find a fresh one."""
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
            at = _next(at, response)
        raise EngineError(tr("The server redirects again and again."), tr("Try it later."))

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
        """Return whether the token may go there: to the hub alone, and not in the open."""
        hub = self._endpoint
        is_private = at.scheme == "https" or at.host in LOCAL
        return is_private and (at.scheme, at.host, at.port) == (hub.scheme, hub.host, hub.port)


def _next(at: httpx2.URL, response: httpx2.Response) -> httpx2.URL:
    """Return where an answer leads to."""
    goal = at.join(response.headers["location"])
    if at.scheme == "https" and goal.scheme != "https":
        raise EngineError(tr("The server redirects to an address without encryption."))
    return goal


def _checked(response: httpx2.Response, file: RemoteFile, start: int) -> RangeAnswer:
    """Return the bytes of an answer that is about the right file and place."""
    if response.status_code in EXPIRED and response.request.url != file.url:
        raise TryLater(tr("The address that the hub has given does not work."))
    _check_status(response)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TryLater(tr("The server sends the file in another form than asked for."))
    size = _whole_size(response)
    mark = "" if file.sha256 else response.headers.get("etag", "")
    if size not in (None, file.n_bytes) or (mark and file.commit and mark != file.commit):
        raise _changed(file)
    chunks = response.iter_raw()
    if response.status_code == 200:
        return RangeAnswer(0, True, chunks)
    match = RANGE.fullmatch(response.headers.get("content-range", ""))
    if match is None or int(match[1]) != start:
        raise TryLater(tr("The server sends another part of the file than asked for."))
    return RangeAnswer(start, False, chunks)


def _whole_size(response: httpx2.Response) -> int | None:
    """Return the size of the whole file that an answer is about; None if it does not say."""
    if response.status_code == 206:
        match = RANGE.fullmatch(response.headers.get("content-range", ""))
        return int(match[3]) if match and match[3] != "*" else None
    length = response.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"\d{1,18}", length, re.ASCII) else None


def _check_status(response: httpx2.Response) -> None:
    """Raise the error of an answer that has no bytes of the file."""
    status, host = response.status_code, one_line(response.request.url.host, 60)
    if status in (200, 206):
        return
    if status in (401, 403):
        raise _denial(response)
    if status in (404, 410):
        raise EngineError(
            tr("{host} does not have this file any more.").format(host=host),
            tr("Look for the model again."),
        )
    if status == 416:
        raise FileChanged(
            tr("The file has become shorter on the server."), tr("Look for the model again.")
        )
    if status in BUSY:
        after = response.headers.get("retry-after", "")
        wait_s = min(float(after), MAX_WAIT_S) if after.isdecimal() else 0.0
        is_asking = status == 429
        why = (
            tr("{host} asks to wait.") if is_asking else tr("{host} has a fault (status {status}).")
        )
        raise TryLater(why.format(host=host, status=status), wait_s)
    raise EngineError(
        tr("{host} answers with status {status}.").format(host=host, status=status),
        tr("Try it later."),
    )


def _denial(response: httpx2.Response) -> EngineError:
    """Return the error of a server that wants to know who asks."""
    host = one_line(response.request.url.host, 60)
    if response.headers.get("x-error-code") == "GatedRepo":
        return Denied(
            tr("This model is gated: its publisher wants you to accept conditions first."),
            tr("Accept them on the model's page, then enter a token of your account here."),
        )
    if "authorization" in response.request.headers:
        return Denied(
            tr("{host} does not let your token read this file.").format(host=host),
            tr("Check the token, and whether your account may see the model."),
        )
    return Denied(
        tr("{host} wants to know who asks for this file.").format(host=host),
        tr("Enter a token of your account; a gated model has conditions on its page, too."),
    )


def _changed(file: RemoteFile) -> FileChanged:
    name = one_line(file.name.rpartition("/")[2], 80)
    return FileChanged(
        tr("{name} was changed on the server since you chose it.").format(name=name),
        tr("What had arrived was deleted. Look for the model again."),
    )


def _reason(error: Exception) -> str:
    """Return why a connection has failed, without addresses, which may be signed."""
    if isinstance(error, httpx2.TimeoutException):
        return tr("The server does not answer.")
    if isinstance(error, httpx2.ConnectError):
        return tr("The server cannot be reached.")
    return tr("The connection was cut.")
