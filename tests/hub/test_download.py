"""Transfers over real HTTP: cuts, kills, wrong bytes, full disks."""

from __future__ import annotations

import errno
import hashlib
import http.client
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.web import Site, serving
from topg.errors import CapacityError, DownloadError
from topg.hub.catalogue import Pin
from topg.hub.download import NotThereError, Web, download, is_pinned

CONTENT = random.Random(1).randbytes(3_000_000)
PIN = Pin(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
WEB = Web(timeout=10, pauses=(0, 0))


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site({"/file": CONTENT})) as site:
        yield site


def ignore(done: int, total: int) -> None:
    """A progress callback for tests that do not look at it."""


def fetch(site: Site, target: Path, pin: Pin = PIN) -> None:
    download(f"{site.url}/file", target, pin, web=WEB, progress=ignore)


def part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def test_a_file_arrives_and_its_progress_is_told(site: Site, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    target = tmp_path / "new" / "file"
    download(f"{site.url}/file", target, PIN, web=WEB, progress=lambda *step: told.append(step))
    assert target.read_bytes() == CONTENT
    assert told[0] == (0, PIN.size)
    assert told[-1] == (PIN.size, PIN.size)
    assert told == sorted(told)
    assert [file.name for file in target.parent.iterdir()] == ["file"]
    assert is_pinned(target, PIN)


def test_a_cut_transfer_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.cuts = [1_000_000, 500_000]
    fetch(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [wanted for _, wanted, _ in site.asked] == ["", "bytes=1000000-", "bytes=1500000-"]


def test_too_many_cuts_keep_the_part_for_the_next_try(site: Site, tmp_path: Path) -> None:
    site.cuts = [100_000] * 3
    with pytest.raises(DownloadError, match=r"failed 3 times.*what arrived is kept"):
        fetch(site, tmp_path / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["file.part"]
    fetch(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert site.asked[-1][1] == "bytes=300000-"


class UnpluggedWeb(Web):
    """A network that goes away within the first response, as a pulled cable or a closed lid makes it."""

    def open(self, url: str, headers: Mapping[str, str], authorization: str | None = None) -> http.client.HTTPResponse:
        if "Range" in headers:
            raise DownloadError("still no network")
        response, blocks = super().open(url, headers, authorization), iter([b"x" * 1000])

        def read(size: int) -> bytes:
            for block in blocks:
                return block
            raise OSError(errno.EHOSTUNREACH, "No route to host")

        response.read = read  # type: ignore[method-assign,assignment]
        return response


def test_a_network_that_goes_away_keeps_the_part(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="still no network"):
        download(f"{site.url}/file", tmp_path / "file", PIN, web=UnpluggedWeb(pauses=(0,)), progress=ignore)
    assert part_of(tmp_path / "file").read_bytes() == b"x" * 1000


def test_a_progress_that_cannot_be_told_keeps_the_part(site: Site, tmp_path: Path) -> None:
    def broken(done: int, total: int) -> None:
        if done:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        download(f"{site.url}/file", tmp_path / "file", PIN, web=WEB, progress=broken)
    assert part_of(tmp_path / "file").stat().st_size > 0


def test_a_server_without_ranges_starts_over(site: Site, tmp_path: Path) -> None:
    site.cuts = [1_000_000]
    site.ranges = False
    fetch(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_asked_again(site: Site, tmp_path: Path, status: int) -> None:
    site.errors = [status, status]
    fetch(site, tmp_path / "file")
    assert len(site.asked) == 3


@pytest.mark.parametrize(("status", "error"), [(403, DownloadError), (404, NotThereError)])
def test_a_refusing_server_is_asked_once(site: Site, tmp_path: Path, status: int, error: type[Exception]) -> None:
    site.errors = [status]
    with pytest.raises(error, match=f"127.0.0.1 answered {status}"):
        fetch(site, tmp_path / "file")
    assert len(site.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(Site()) as site:
        pass
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached"):
        fetch(site, tmp_path / "file")


def test_a_wrong_hash_leaves_nothing(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not what was pinned"):
        fetch(site, tmp_path / "file", Pin("0" * 64, PIN.size))
    assert list(tmp_path.iterdir()) == []


def test_a_longer_file_than_pinned_is_not_stored(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="1001 bytes"):
        fetch(site, tmp_path / "file", Pin(hashlib.sha256(CONTENT[:1000]).hexdigest(), 1000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("junk", [b"junk", b"junk" * 1_000_000], ids=["shorter", "longer"])
def test_a_damaged_part_is_thrown_away_and_fetched_anew(site: Site, tmp_path: Path, junk: bytes) -> None:
    part_of(tmp_path / "file").write_bytes(junk)
    fetch(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_longer_than_the_servers_file_is_thrown_away(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = CONTENT[:1000]
    part_of(tmp_path / "file").write_bytes(b"x" * 2000)
    with pytest.raises(DownloadError):
        fetch(site, tmp_path / "file")
    assert site.asked[1][1] == ""
    assert not (tmp_path / "file").exists()


def test_a_complete_part_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT)
    fetch(site, tmp_path / "file")
    assert site.asked == []


def test_a_file_larger_than_the_disk_is_refused_before_the_transfer(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs 1000 TB, .* free; make room"):
        fetch(site, tmp_path / "file", Pin("0" * 64, 10**15))
    assert site.asked == []


def test_only_http_addresses_are_opened(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not an http or https address"):
        download("file:///etc/passwd", tmp_path / "file", PIN, web=WEB, progress=ignore)


def test_credentials_do_not_follow_a_redirect(site: Site, tmp_path: Path) -> None:
    site.redirects["/moved"] = f"{site.url}/file"
    download(f"{site.url}/moved", tmp_path / "file", PIN, web=WEB, progress=ignore, authorization="Basic c2VjcmV0")
    assert [(path, credentials) for path, _, credentials in site.asked] == [
        ("/moved", "Basic c2VjcmV0"),
        ("/file", ""),
    ]


CHILD = """
    import resource, sys
    from pathlib import Path
    from topg.hub.catalogue import Pin
    from topg.hub.download import Web, download
    from topg.errors import DownloadError

    url, target, sha256, size, limit = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        download(url, Path(target), Pin(sha256, int(size)), web=Web(), progress=lambda done, total: None)
    except DownloadError as error:
        sys.exit(str(error))
"""


def child(site: Site, target: Path, limit: int = 0) -> subprocess.Popen[str]:
    arguments = [f"{site.url}/file", str(target), PIN.sha256, str(PIN.size), str(limit)]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), *arguments], stderr=subprocess.PIPE, text=True
    )


def test_a_killed_process_leaves_a_part_that_the_next_one_resumes(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "file"
    site.gate = threading.Event()
    with child(site, target) as process:
        deadline = time.monotonic() + 20
        while not (part_of(target).exists() and part_of(target).stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    site.gate.set()
    there = part_of(target).stat().st_size
    assert 0 < there < PIN.size
    assert [file.name for file in tmp_path.iterdir()] == ["file.part"]

    fetch(site, target)

    assert target.read_bytes() == CONTENT
    assert site.asked[-1][1] == f"bytes={there}-"


def test_a_full_disk_is_told_and_left_clean(site: Site, tmp_path: Path) -> None:
    with child(site, tmp_path / "file", limit=1_500_000) as process:
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode == 1
    assert "cannot write" in message
    assert "File too large" in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []
