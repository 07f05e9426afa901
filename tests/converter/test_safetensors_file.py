from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.checkpoints import safetensors_bytes, write_safetensors
from support.limited_open import ROOT, open_all
from topg.converter.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
from topg.converter.safetensors_writer import SafetensorsWriter
from topg.converter.strict_json import MAX_VALUES
from topg.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from topg.precision.formats import Part

X = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DATA = bytes(16)
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="sets limits the Linux way")


def _entry(**changes: Any) -> bytes:
    return safetensors_bytes({"x": X | changes}, DATA)


# What is wrong: the file, and words of the error.
DAMAGED = {
    "empty": (b"", "cut short"),
    "seven_bytes": (bytes(7), "cut short"),
    "huge_header": ((2**63).to_bytes(8, "little") + b"{}", "claims a header"),
    "header_past_end": ((1000).to_bytes(8, "little") + b"{}", "the whole file 10"),
    "not_json": (safetensors_bytes(b"{x"), "safetensors header"),
    "not_utf8": (safetensors_bytes(b'{"\xff": 1}'), "safetensors header"),
    "not_an_object": (safetensors_bytes([1]), "must hold a JSON object"),
    "deeply_nested": (safetensors_bytes(b"[" * 200_000), "safetensors header"),
    "not_a_number": (safetensors_bytes(b'{"x": NaN}'), "NaN is not a JSON number"),
    "repeated_name": (safetensors_bytes(b'{"x": %s, "x": %s}' % ((json.dumps(X).encode(),) * 2), DATA), "twice"),
    "entry_not_an_object": (safetensors_bytes({"x": 1}), "and nothing else"),
    "key_missing": (safetensors_bytes({"x": {"dtype": "F32", "shape": [2]}}), "and nothing else"),
    "key_unknown": (_entry(extra=1), "and nothing else"),
    "unknown_type": (_entry(dtype="F31"), "unknown type 'F31'"),
    "type_not_a_text": (_entry(dtype=["F32"]), "unknown type"),
    "negative_shape": (_entry(shape=[-2, -2]), "impossible shape"),
    "fractional_shape": (_entry(shape=[2.0, 2]), "impossible shape"),
    "true_shape": (_entry(shape=[True, 4]), "impossible shape"),
    "huge_shape": (_entry(shape=[2**40, 2**40]), "impossible shape"),
    "huge_shape_of_nothing": (_entry(shape=[0, 2**62]), "impossible shape"),
    "too_many_dimensions": (_entry(shape=[1] * 9), "impossible shape"),
    "shape_and_offsets_differ": (_entry(shape=[2, 3]), "takes 16 bytes by its offsets, but F32 [2, 3] takes 24"),
    "offsets_reversed": (_entry(data_offsets=[16, 0]), "impossible data_offsets"),
    "offsets_negative": (_entry(data_offsets=[-16, 0]), "impossible data_offsets"),
    "three_offsets": (_entry(data_offsets=[0, 8, 16]), "impossible data_offsets"),
    "gap": (safetensors_bytes({"x": X | {"data_offsets": [4, 20]}}, bytes(20)), "leaves a gap"),
    "overlap": (safetensors_bytes({"x": X, "y": X | {"data_offsets": [8, 24]}}, bytes(24)), "overlaps"),
    "cut_short": (safetensors_bytes({"x": X}, bytes(15)), "cut short"),
    "too_long": (safetensors_bytes({"x": X}, bytes(17)), "1 bytes longer"),
    "metadata_not_texts": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, words = DAMAGED[name]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@needs_limits
def test_damaged_and_mutated_files_take_no_memory(tmp_path: Path) -> None:
    good = safetensors.numpy.save({"x": np.ones((3, 4), np.float32), "y": np.ones(5, np.float16)}, {"a": "b"})
    generator = random.Random(3)
    contents = [content for content, _ in DAMAGED.values()]
    for _ in range(200):
        mutated = bytearray(good)
        mutated[generator.randrange(len(good))] = generator.randrange(256)
        contents.append(bytes(mutated))
    contents += [good[:length] for length in range(0, len(good), 5)]
    files = [tmp_path / f"{number}.safetensors" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    kinds = {outcome.split(":")[0] for outcome in open_all(files, megabytes=32).values()}
    assert kinds == {"opened", "CheckpointError"}


@needs_limits
def test_headers_at_the_limit_stay_small_in_memory(tmp_path: Path) -> None:
    bombs = {
        "lists": b'{"a": [' + b"[]," * (MAX_HEADER_BYTES // 3),
        "few_lists": b'{"a": [' + b"[]," * (MAX_VALUES // 2 - 9) + b"[]]}",
        "texts": b'{"a": [' + b'"12",' * (MAX_HEADER_BYTES // 5),
        "keys": b"{" + b",".join(b'"%d":0' % number for number in range(MAX_VALUES // 2 - 9)) + b"}",
    }
    files = [tmp_path / f"{name}.safetensors" for name in bombs]
    for file, header in zip(files, bombs.values(), strict=True):
        file.write_bytes(safetensors_bytes(header.ljust(MAX_HEADER_BYTES)[:MAX_HEADER_BYTES]))
    outcomes = open_all(files, megabytes=200)
    assert {outcome.split(":")[0] for outcome in outcomes.values()} == {"CheckpointError"}, outcomes


def test_a_file_of_many_tensors_is_opened(tmp_path: Path) -> None:
    tensors = {f"model.layers.{number}.mlp.down_proj.weight": np.ones(2, np.float32) for number in range(20_000)}
    file = SafetensorsFile(write_safetensors(tmp_path / "many.safetensors", tensors))
    assert len(file.tensor_names) == 20_000


def test_files_of_the_official_library_are_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    tensors = {
        str(np.dtype(kind)): generator.integers(0, 2, (3, 5)).astype(kind)
        for kind in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")
    }
    tensors |= {"vector": np.arange(7, dtype=np.float32), "nothing": np.zeros((0, 4), np.float32)}
    path = tmp_path / "official.safetensors"
    safetensors.numpy.save_file(tensors, path, {"made": "by test"})
    file = SafetensorsFile(path)
    assert set(file.tensor_names) == set(tensors)
    assert file.metadata == {"made": "by test"}
    for name, values in tensors.items():
        assert (file.dtype(name), file.shape(name)) == (values.dtype.name, values.shape)
        np.testing.assert_array_equal(file.array(name), values)


def test_bfloat16_comes_as_bit_patterns(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.0], [0.5, 0.0]], np.float32)
    file = SafetensorsFile(write_safetensors(tmp_path / "half.safetensors", {"x": values}, "bfloat16"))
    assert file.dtype("x") == "bfloat16"
    np.testing.assert_array_equal(file.array("x"), np.array([[0x3F80, 0xC000], [0x3F00, 0]], np.uint16))


def test_rows_are_copied_and_never_cut_to_size(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    file = SafetensorsFile(write_safetensors(tmp_path / "rows.safetensors", {"x": values}))
    np.testing.assert_array_equal(file.read_rows("x", 1, 3), values[1:3])
    assert file.read_rows("x", 4, 4).shape == (0, 3)
    for start, stop in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(IndexError, match="do not exist; it has 4"):
            file.read_rows("x", start, stop)


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "cut.safetensors", {"x": np.ones((64, 64), np.float32)})
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read_rows("x", 0, 64)


def test_arrays_are_read_only_and_outlive_the_file_object(tmp_path: Path) -> None:
    values = SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})).array("x")
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 2
    np.testing.assert_array_equal(values, np.ones(3, np.float32))


@needs_limits
def test_released_memory_is_given_back_and_read_again(tmp_path: Path) -> None:
    def resident_kilobytes() -> int:
        after_path = Path("/proc/self/smaps").read_text().split(str(path))[1]
        return int(after_path.split("Rss:")[1].split()[0])

    path = write_safetensors(tmp_path / "x.safetensors", {"x": np.arange(1 << 20, dtype=np.float32)})
    file = SafetensorsFile(path)
    array = file.array("x")
    total = array.sum()
    assert resident_kilobytes() >= 4096
    file.release_memory()
    assert resident_kilobytes() < 4096
    assert array.sum() == total


def test_types_without_whole_bytes_are_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "four.safetensors"
    path.write_bytes(safetensors_bytes({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2)))
    with pytest.raises(UnsupportedModelError, match="type float4"):
        SafetensorsFile(path).array("x")


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        SafetensorsFile(tmp_path / "nowhere.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'y'"):
        SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})).array("y")


READ_LARGE = """
import sys
from pathlib import Path
from support.limited_open import limit_memory
from topg.converter.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
limit_memory(48)
file = SafetensorsFile(Path(sys.argv[1]))
print(sum(len(file.read_rows("x", row, row + 1024)) for row in range(0, 65536, 1024)))
"""


@needs_limits
def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "large.safetensors", 65536 * 1024 * 4
    path.write_bytes(safetensors_bytes({"x": {"dtype": "F32", "shape": [65536, 1024], "data_offsets": [0, nbytes]}}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + nbytes)
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", READ_LARGE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "65536\n", done.stderr


PARTS = {
    "scales": Part("bfloat16", (4, 3)),
    "codes": Part("int8", (4, 64)),
    "odd": Part("uint8", (3, 3)),
    "values": Part("float32", (5,)),
    "half": Part("float16", (4, 16)),
}


def _values(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    types = {"bfloat16": np.uint16, "int8": np.int8, "uint8": np.uint8, "float32": np.float32, "float16": np.float16}
    return {name: generator.integers(0, 99, part.shape).astype(types[part.dtype]) for name, part in PARTS.items()}


def test_written_files_are_read_by_both_readers(tmp_path: Path) -> None:
    path, values = tmp_path / "written.safetensors", _values()
    with SafetensorsWriter(path, PARTS, {"format": "test"}) as writer:
        for name, rows in values.items():
            writer.write(name, rows)
    ours = SafetensorsFile(path)
    with safetensors.safe_open(path, "numpy") as theirs:
        assert theirs.metadata() == ours.metadata == {"format": "test"}
        assert {name: tuple(theirs.get_slice(name).get_shape()) for name in theirs.keys()} == {  # noqa: SIM118
            name: part.shape for name, part in PARTS.items()
        }
        for name in values.keys() - {"scales"}:  # numpy has no bfloat16, so the official reader cannot hand it over
            np.testing.assert_array_equal(theirs.get_tensor(name), values[name])
    for name, part in PARTS.items():
        assert ours.dtype(name) == part.dtype
        np.testing.assert_array_equal(ours.array(name), values[name])


def test_tensors_are_aligned(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "aligned.safetensors", PARTS, {}) as writer:
        for name, rows in _values().items():
            writer.write(name, rows)
    tensors = SafetensorsFile(writer.path).tensors
    assert tensors["codes"].offset % 64 == tensors["half"].offset % 64 == 0
    assert all(tensor.offset % (tensor.element.bits // 8) == 0 for tensor in tensors.values())


@pytest.mark.parametrize("seed", range(8))
def test_interleaved_rows_give_the_same_file_and_its_hash(tmp_path: Path, seed: int) -> None:
    values, turns = _values(), [name for name, part in PARTS.items() for _ in range(part.shape[0])]
    random.Random(seed).shuffle(turns)
    done = dict.fromkeys(PARTS, 0)
    with SafetensorsWriter(tmp_path / "interleaved.safetensors", PARTS, {}) as writer:
        for name in turns:
            writer.write(name, values[name][done[name] : done[name] + 1])
            done[name] += 1
    with SafetensorsWriter(tmp_path / "ordered.safetensors", PARTS, {}) as ordered:
        for name, rows in values.items():
            ordered.write(name, rows)
    assert writer.path.read_bytes() == ordered.path.read_bytes()
    assert writer.sha256 == ordered.sha256 == hashlib.sha256(writer.path.read_bytes()).hexdigest()


def test_an_incomplete_file_is_an_error_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "incomplete.safetensors"
    with (
        pytest.raises(CheckpointError, match="only 2 of 4 rows of 'codes' were written"),
        SafetensorsWriter(path, {"codes": PARTS["codes"]}, {}) as writer,
    ):
        writer.write("codes", _values()["codes"][:2])
    assert not path.exists()


def test_a_failure_while_writing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "failed.safetensors"
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, PARTS, {}):
        raise KeyboardInterrupt
    assert not path.exists()


@needs_limits
def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    import resource

    path, limits = tmp_path / "full.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="too large"),
            SafetensorsWriter(path, {"x": Part("int8", (9000, 1))}, {}) as w,
        ):
            w.write("x", np.zeros((9000, 1), np.int8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there.safetensors"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        SafetensorsWriter(path, PARTS, {})
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 64), np.uint8),
        np.zeros((1, 63), np.int8),
        np.zeros((5, 64), np.int8),
        np.zeros(64, np.int8),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, rows: np.ndarray[Any, Any]) -> None:
    with (
        pytest.raises(ValueError, match="does not fit"),
        SafetensorsWriter(tmp_path / "unfit.safetensors", PARTS, {}) as writer,
    ):
        writer.write("codes", rows)


def test_a_hash_before_the_end_is_refused(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "early.safetensors", {}, {}) as writer, pytest.raises(ValueError, match="finish"):
        writer.sha256  # noqa: B018
    assert writer.sha256 == hashlib.sha256(writer.path.read_bytes()).hexdigest()
