"""What a compiler made of the kernels: sums stay in registers, prefetches are there, symbols stay private.

Reads the object files of the build that is installed; results of the kernels are tested elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from topg import _native

BUILDS = Path(__file__).parents[2] / "build"
OBJECTS = {
    path.stem.removeprefix("isa_").removesuffix(".cpp"): path
    for path in sorted(BUILDS.glob("cp*/CMakeFiles/topg_isa_*.dir/native/kernels/*.o"), key=lambda p: p.stat().st_mtime)
}
AVX512 = ("avx512_vnni", "avx512_vnni_bf16", "amx")
MULTIPLIES = re.compile(r"vpdpbusd|vpmaddwd|vpmaddubsw|vfmadd\d+ps|vdpbf16ps|tdp\w+")
WHOLE_VECTOR_ON_STACK = re.compile(r"vmov\w+ .*(%[yz]mm\d+,.*\(%r[sb]p\b|\(%r[sb]p\b.*,%[yz]mm)")
PLAIN_TILES = "multiply_(?:rows|plain)"  # the first of them where the second has not inlined it
INT4 = "4"  # WeightCode::kInt4 as demangled names have it

pytestmark = [
    pytest.mark.skipif(not OBJECTS, reason="the native module was not built in build/"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump and nm of GNU binutils"),
]


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        found = re.match(r"j\w+ +([0-9a-f]+)\b", self.text)
        return int(found[1], 16) if found else None


Function = tuple[Instruction, ...]


@lru_cache
def functions(isa: str) -> dict[str, Function]:
    """Instructions of an object's functions, by demangled name."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(object_of(isa))]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = {}
    for part in listing.split("\n\n"):
        head = re.match(r"[0-9a-f]+ <(.*)>:\n", part)
        if head:
            found = re.finditer(r"^ *([0-9a-f]+):\t(.*)$", part, re.MULTILINE)
            result[head[1]] = tuple(Instruction(int(line[1], 16), line[2]) for line in found)
    return result


def object_of(isa: str) -> Path:
    if isa not in OBJECTS:
        pytest.skip(f"this build has no kernels for {isa}")
    return OBJECTS[isa]


def multiplying_loops(function: Function) -> list[list[str]]:
    """The smallest loops that multiply: what is between a jump back and its target."""
    jumps = [(i.target, i.address) for i in function if i.target is not None]
    spans = [(first, last) for first, last in jumps if function[0].address <= first <= last]
    multiplications = [i.address for i in function if MULTIPLIES.match(i.text)]
    spans = [(first, last) for first, last in spans if any(first <= at <= last for at in multiplications)]
    return [
        [i.text for i in function if first <= i.address <= last]
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def count(pattern: str | re.Pattern[str], loop: list[str]) -> int:
    return sum(re.search(pattern, text) is not None for text in loop)


def tiles(isa: str, name: str) -> dict[str, Function]:
    """Instances of a template whose name matches `name`."""
    found = {function: code for function, code in functions(isa).items() if re.search(f"::{name}<", function)}
    assert found, f"no function of {isa} is called {name}: was it renamed, or inlined?"
    return found


@pytest.mark.parametrize("isa", AVX512)
def test_grouped_tiles_hold_their_sums_in_registers_and_prefetch(isa: str) -> None:
    """An inner step is 4 columns, or 8 of int4: two multiplications a row each, and the lines the tile was made for."""
    for name, code in tiles(isa, "grouped_tile").items():
        found = re.search(r"grouped_tile<.*GroupedFormat<\(topg::WeightCode\)(\d).*>, (\d+), (\d+)>", name)
        assert found is not None, name
        steps, rows, lines = 2 if found[1] == INT4 else 1, int(found[2]), int(found[3])
        loops = multiplying_loops(code)
        assert len(loops) == 1, name
        assert count("vpdpbusd", loops[0]) == 2 * rows * steps, name
        assert count("prefetcht1", loops[0]) == lines * steps, name
        assert count(r"\(%r[sb]p\b", loops[0]) == 0, f"{name} spills"


@pytest.mark.parametrize(
    ("isa", "name"),
    [
        ("avx2", "grouped_avx2_tile"),
        *((isa, name) for isa in ("avx2", *AVX512) for name in ("weight_only_tile", PLAIN_TILES)),
        ("amx", "grouped_amx_tile"),
    ],
)
def test_few_vectors_go_through_memory_in_an_inner_loop(isa: str, name: str) -> None:
    """The largest tiles may give up a register or two for reading the weights less often; AVX2 has half as many."""
    allowed = 0.4 if isa == "avx2" else 0.125  # of a multiplication
    for function, code in tiles(isa, name).items():
        loops = multiplying_loops(code)
        assert loops or name == PLAIN_TILES, function
        for loop in loops:
            spills = count(WHOLE_VECTOR_ON_STACK, loop)
            assert spills <= allowed * count(MULTIPLIES, loop), function + "\n" + "\n".join(loop)


@pytest.mark.parametrize("isa", ["scalar", "avx2", *AVX512])
def test_an_object_exports_its_table_only(isa: str) -> None:
    """Anything else could be taken by the linker for code that must run on every processor."""
    listing = subprocess.run(
        ["nm", "--demangle", "--defined-only", str(object_of(isa))], capture_output=True, text=True, check=True
    ).stdout
    exported = [line.split(maxsplit=2)[2] for line in listing.splitlines() if line.split()[1] not in "tbdrn"]
    assert exported == [f"topg::{isa}_kernels()"]


def test_the_objects_are_those_of_the_module() -> None:
    built = {isa for isa in OBJECTS if not isa.endswith("_bf16")}
    assert built == set(_native.built_isas())
