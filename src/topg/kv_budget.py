"""How many KV pages a model gets: enough for a full batch of full contexts, as far as memory allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from topg.backends import BackendType, backend_type
from topg.config import Config
from topg.converter.manifest import Manifest
from topg.errors import CapacityError, UnsupportedModelError
from topg.kv.pages import TOKENS_STEP, KVGeometry, KVType, tokens_per_page
from topg.units import format_size

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class KVBudget:
    """Shape and number of the pages."""

    geometry: KVGeometry
    page_count: int


def plan_kv(manifest: Manifest, settings: Config, max_context: int, device: str = "cpu") -> KVBudget:
    """Pages for `max_batch_size` sequences of `max_context` tokens, or the most that memory.preallocate allows.

    The back end tells what the weights take once they are loaded, and what is free on a device with its own memory.
    Raises CapacityError when not even one such sequence fits.
    """
    backend = backend_type(settings.execution.backend, device)
    geometry = _geometry(manifest, settings, max_context, backend)
    per_sequence = -(-max_context // geometry.tokens_per_page)
    wanted = per_sequence * settings.execution.max_batch_size
    room = _room(manifest, settings.memory.preallocate, device, backend)
    if room is None:
        return KVBudget(geometry, wanted)
    page_bytes = backend.page_bytes(geometry)
    affordable = room // page_bytes
    if affordable < per_sequence:
        needed = format_size(per_sequence * page_bytes)
        raise CapacityError(
            f"a context of {max_context} tokens needs {needed} of KV cache, "
            f"and {format_size(room)} may be used (memory.preallocate of what is free after the weights): lower "
            "max_context, or free some memory"
        )
    return KVBudget(geometry, min(wanted, affordable))


def available_memory() -> int | None:
    """Bytes that can be allocated now, also within a container's limit; None where the system does not tell."""
    known = [size for size in (_free_of_machine(), _free_of_cgroup()) if size is not None]
    return min(known, default=None)


def _room(manifest: Manifest, share: float, device: str, backend: BackendType) -> int | None:
    """Bytes that KV pages may take; None where nobody knows what is free."""
    free = backend.device_memory(device)
    if free is None:
        free = available_memory()
    if free is None:
        return None
    weights = sum(backend.resident_bytes(record.precision, record.shape) for record in manifest.tensors.values())
    return int(max(0, free - weights) * share)


def _geometry(manifest: Manifest, settings: Config, max_context: int, backend: BackendType) -> KVGeometry:
    attention = manifest.plan.attention
    if not attention:
        raise UnsupportedModelError(
            f"{manifest.name} has no attention layer; ToPG runs models that attend to a context"
        )
    wanted = settings.execution.kv_cache_dtype
    dtype: KVType = ("float32" if manifest.recipe == "float32" else "bfloat16") if wanted == "auto" else wanted
    shape = (len(attention), attention[0].kv_heads, attention[0].head_dim)
    bytes_per_token = backend.page_bytes(KVGeometry(*shape, dtype, TOKENS_STEP)) // TOKENS_STEP
    usable = -(-max_context // TOKENS_STEP) * TOKENS_STEP  # no sequence fills more of a page
    tokens = min(usable, tokens_per_page(bytes_per_token, settings.memory.page_size))
    return KVGeometry(*shape, dtype, tokens)


def _free_of_machine() -> int | None:
    if not MEMINFO.is_file():
        return None
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_cgroup() -> int | None:
    """What a cgroup (version 2) limit leaves; file pages count as free, they are given up under pressure."""
    limit, used, stat = CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat"
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return None
    lines = stat.read_text().splitlines() if stat.is_file() else []
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
