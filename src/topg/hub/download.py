"""Downloading a pinned file: it resumes, it is checked, and it appears whole or not at all.

The bytes go to `<target>.part`, which survives a cut or a kill and is where the next try resumes (HTTP Range,
RFC 9110 section 14).  When all are there and their SHA-256 is the pinned one, the part takes the target's name.
"""

from __future__ import annotations

import http.client
import io
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from topg.errors import DownloadError
from topg.files import CHUNK_BYTES, require_space, sha256_of
from topg.hub.catalogue import Pin
from topg.hub.store import SPACE_ADVICE

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes there, bytes in all) of the file."""


class _CutError(Exception):
    """The transfer stopped before its end; trying again may help."""


class _NoSuchRangeError(_CutError):
    """The server has no such range: what was stored so far is no beginning of its file."""


class NotThereError(DownloadError):
    """The server knows no such address."""


class _WrongBytesError(Exception):
    """All bytes are there and they are not the pinned ones."""


@dataclass(frozen=True)
class Web:
    """How to reach servers.  Proxies come from the environment (HTTPS_PROXY and its kin), as usual."""

    context: ssl.SSLContext | None = None
    timeout: float = 30.0
    pauses: Sequence[float] = (0.5, 1.0, 2.0, 4.0)
    sleep: Callable[[float], None] = time.sleep

    def open(self, url: str, headers: Mapping[str, str], authorization: str | None = None) -> http.client.HTTPResponse:
        """The open response to a GET, for the caller to close; raises _CutError or DownloadError.

        `authorization` is not passed on when the server redirects: it may lead to another host.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise DownloadError(f"{url!r} is not an http or https address")
        request = urllib.request.Request(url, headers={"User-Agent": "topg", "Accept-Encoding": "identity", **headers})
        if authorization is not None:
            request.add_unredirected_header("Authorization", authorization)
        with network_errors(url):
            response: http.client.HTTPResponse = urllib.request.urlopen(
                request, timeout=self.timeout, context=self.context
            )
        return response

    def retry(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which may raise _CutError and is then tried again after each pause."""
        for pause in self.pauses:
            try:
                return attempt()
            except _CutError:
                self.sleep(pause)
        try:
            return attempt()
        except _CutError as error:
            tries = len(self.pauses) + 1
            message = f"{what} failed {tries} times, at last: {error}; try again, what arrived is kept"
            raise DownloadError(message) from error


@contextmanager
def network_errors(url: str) -> Iterator[None]:
    """Turns the many errors of a transfer into two: try again (_CutError), or give up (DownloadError)."""
    host = urlsplit(url).hostname or url
    try:
        yield
    except urllib.error.HTTPError as error:
        raise _http_error(host, error) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{host} has a certificate that is not trusted: {error.reason}") from error
        raise _CutError(f"{host} cannot be reached: {error.reason}") from error
    except (http.client.HTTPException, OSError) as error:  # a reset, a time-out, a route that is gone
        raise _CutError(f"the connection to {host} broke: {error or type(error).__name__}") from error


def _http_error(host: str, error: urllib.error.HTTPError) -> Exception:
    error.close()
    message = f"{host} answered {error.code} {error.reason}"
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _NoSuchRangeError(message)
    if error.code in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.GONE):
        return NotThereError(message)
    return _CutError(message) if error.code in RETRY_STATUS else DownloadError(message)


def download(
    url: str, target: Path, pin: Pin, *, web: Web, progress: Progress, authorization: str | None = None
) -> None:
    """Fetch `url` to `target`, which then holds exactly the pinned bytes.

    A `<target>.part` of an earlier try is resumed.  The caller sees to it that no one else writes the same target.
    Raises DownloadError, and then leaves no target: after a cut the part stays for the next try; when the bytes are
    wrong or cannot be written nothing stays.  Raises CapacityError when the disk has no room for what is missing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    transfer = _Transfer(url, _part_of(target), pin, web, progress, authorization)
    resumed = transfer.there() > 0
    require_space(target.parent, pin.size - transfer.there(), SPACE_ADVICE)
    try:
        transfer.run()
    except _WrongBytesError as error:
        if not resumed:
            raise DownloadError(f"{target.name}: {error}") from error
        transfer.run_again(target.name)  # what an earlier try left may be at fault, not what the server sends
    transfer.part.replace(target)


def bytes_there(target: Path) -> int:
    """Bytes of `target` that an earlier try left, whole or as a part to resume from."""
    return max((file.stat().st_size for file in (target, _part_of(target)) if file.is_file()), default=0)


def is_pinned(file: Path, pin: Pin) -> bool:
    """Whether `file` stands there with exactly the pinned bytes."""
    return file.is_file() and file.stat().st_size == pin.size and sha256_of(file) == pin.sha256


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Within the block only `file` is written; a failing disk becomes a DownloadError and leaves nothing of it."""
    try:
        yield
    except OSError as error:
        file.unlink(missing_ok=True)
        raise DownloadError(f"cannot write {file}: {error.strerror}") from error


@dataclass
class _Transfer:
    """One file on its way into its part."""

    url: str
    part: Path
    pin: Pin
    web: Web
    progress: Progress
    authorization: str | None

    def there(self) -> int:
        """Bytes of the part so far."""
        return self.part.stat().st_size if self.part.exists() else 0

    def run(self) -> None:
        """Complete and check the part; when it is wrong it is removed and _WrongBytesError raised."""
        if self.there() < self.pin.size:
            self.web.retry(f"downloading {self.url}", self._attempt)
        size, digest = self.there(), sha256_of(self.part)
        if (size, digest) != (self.pin.size, self.pin.sha256):
            self.part.unlink()
            raise _WrongBytesError(
                f"what arrived is not what was pinned: {size} bytes with SHA-256 {digest}, "
                f"expected {self.pin.size} bytes with {self.pin.sha256}"
            )

    def run_again(self, name: str) -> None:
        try:
            self.run()
        except _WrongBytesError as error:
            raise DownloadError(f"{name}: {error}") from error

    def _attempt(self) -> None:
        start = self.there()
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self.web.open(self.url, headers, self.authorization)
        except _NoSuchRangeError:
            self.part.unlink()
            raise
        with response:
            self._store(response, start if _continues_at(response, start) else 0)
        if self.there() < self.pin.size:
            raise _CutError(f"the connection ended after {self.there()} of {self.pin.size} bytes")

    def _store(self, response: http.client.HTTPResponse, start: int) -> None:
        """Write what the server sends behind the first `start` bytes.  Only a failing disk costs the part."""
        done = start
        with self._opened(start) as file:
            self.progress(done, self.pin.size)
            # One byte more than wanted is enough to see that the file is too long; no more of it is ever stored.
            while block := self._read(response, min(CHUNK_BYTES, self.pin.size + 1 - done)):
                with writing(self.part):
                    _write_all(file, block)
                done += len(block)
                self.progress(min(done, self.pin.size), self.pin.size)
            with writing(self.part):
                os.fsync(file.fileno())

    def _opened(self, start: int) -> io.FileIO:
        # Without a buffer, so that no write is left for the closing of the file.
        with writing(self.part):
            file = io.FileIO(self.part, "r+b" if start else "wb")
            file.seek(start)
            return file

    def _read(self, response: http.client.HTTPResponse, size: int) -> bytes:
        with network_errors(self.url):
            return response.read(size)


def _part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _write_all(file: io.FileIO, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


def _continues_at(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether the server sends the range that was asked for; if not, it sends the file from its beginning."""
    content_range = response.headers.get("Content-Range", "")
    return response.status == http.HTTPStatus.PARTIAL_CONTENT and content_range.startswith(f"bytes {start}-")
