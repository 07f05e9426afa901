from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from support.checkpoints import (
    ARRAY,
    STRING,
    U32,
    gguf_name,
    llama_config,
    llama_tensors,
    raw_array,
    raw_gguf,
    raw_key,
    raw_string,
    write_gguf,
)
from support.limited_open import open_all
from topg.converter.gguf_file import DEQUANTISED_TYPES, GgufFile
from topg.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError

ONE = struct.pack("<I", 1)
F32, Q4_0 = 0, 2
needs_memory_limits = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited the Linux way")


def _aligned(value: int) -> bytes:
    return raw_key(b"general.alignment", U32, struct.pack("<I", value))


def _tensor_file(dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return raw_gguf(tensors=[(b"x", dims, kind, offset)], data=bytes(64))


# What is wrong: the file, and words of the error.
CRAFTED = {
    "empty": (b"", "is empty"),
    "wrong_magic": (raw_gguf(magic=b"GGML"), "starts with b'GGML'"),
    "magic_only": (b"GGUF", "version"),
    "version_1": (raw_gguf(version=1), "version 1"),
    "version_4": (raw_gguf(version=4), "version 4"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
    "many_keys": (raw_gguf(key_count=2**60), f"{2**60} metadata entries"),
    "many_tensors": (raw_gguf(tensor_count=2**60), f"{2**60} tensors"),
    "long_key": (raw_gguf(key_count=1, keys=[raw_string(b"k" * 40, 2**48)]), f"{2**48} bytes long"),
    "key_past_end": (raw_gguf(key_count=1, keys=[raw_string(b"k" * 40, 60000)]), "60000 bytes"),
    "empty_key": (raw_gguf(keys=[raw_key(b"", U32, ONE)]), "0 bytes long"),
    "duplicate_key": (raw_gguf(keys=[raw_key(b"a", U32, ONE)] * 2), "'a', occurs twice"),
    "key_not_utf8": (raw_gguf(keys=[raw_key(b"\xff", U32, ONE)]), "UTF-8"),
    "value_type_256": (raw_gguf(keys=[raw_key(b"a", 256, ONE)]), "value type 256"),
    "long_value": (raw_gguf(keys=[raw_key(b"a", STRING, raw_string(b"v", 2**62))]), f"{2**62} bytes"),
    "bool_2": (raw_gguf(keys=[raw_key(b"a", 7, b"\x02")]), "holds 2"),
    "array_of_arrays": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(ARRAY, 1, raw_array(U32, 0)))]), "arrays"),
    "long_array": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(U32, 2**61))]), f"{2**61} items"),
    "array_past_end": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(U32, 2**21))]), "8388608 bytes"),
    "strings_past_end": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(STRING, 2**21))]), "past the end"),
    "string_past_end": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(STRING, 1, raw_string(b"", 2**63)))]), "past"),
    "array_type_256": (raw_gguf(keys=[raw_key(b"a", ARRAY, raw_array(256, 0))]), "value type 256"),
    "nine_dimensions": (_tensor_file((1,) * 9), "9 dimensions"),
    "no_dimensions": (_tensor_file(()), "0 dimensions"),
    "zero_dimension": (_tensor_file((0, 4)), "impossible dimensions"),
    "product_overflow": (_tensor_file((2**32, 2**32)), "impossible dimensions"),
    "product_wraps_to_small": (_tensor_file((2**32, 2**31, 2, 16)), "impossible dimensions"),
    "half_a_block": (_tensor_file((16, 4), Q4_0), "blocks of 32"),
    "unknown_tensor_type": (_tensor_file((4, 4), 9999), "9999"),
    "offset_past_end": (_tensor_file((4, 4), offset=4096), "cut short or damaged"),
    "offset_huge": (_tensor_file((4, 4), offset=2**64 - 32), "cut short or damaged"),
    "offset_unaligned": (_tensor_file((4, 4), offset=4), "multiple of the alignment 32"),
    "overlap": (raw_gguf(tensors=[(b"x", (4, 4), F32, 0), (b"y", (4, 4), F32, 32)], data=bytes(96)), "overlaps"),
    "duplicate_tensor": (raw_gguf(tensors=[(b"x", (4,), F32, 0)] * 2, data=bytes(64)), "'x', occurs twice"),
    "alignment_0": (raw_gguf(keys=[_aligned(0)]), "not 0"),
    "alignment_48": (raw_gguf(keys=[_aligned(48)]), "not 48"),
    "alignment_text": (raw_gguf(keys=[raw_key(b"general.alignment", STRING, raw_string(b"32"))]), "not '32'"),
    "alignment_huge": (raw_gguf(keys=[_aligned(2**31)]), "power of two up to"),
}  # fmt: skip


def _small_model(path: Path) -> Path:
    return write_gguf(path, config=llama_config(num_hidden_layers=1), weight_type="Q4_0")


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, words = CRAFTED[name]
    path = tmp_path / "crafted.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufFile(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@needs_memory_limits
def test_crafted_files_take_no_memory(tmp_path: Path) -> None:
    files = []
    for name, (content, _) in CRAFTED.items():
        files.append(tmp_path / f"{name}.gguf")
        files[-1].write_bytes(content)
    outcomes = open_all(files, megabytes=32)
    assert [name for name, outcome in outcomes.items() if outcome == "opened"] == []


@needs_memory_limits
def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = _small_model(tmp_path / "good.gguf").read_bytes()
    header = content.index(b"blk.0")
    places = [*range(0, header, header // 30), *range(header, len(content) - 32, (len(content) - header) // 20)]
    files = []
    for place in places:
        files.append(tmp_path / f"{place}.gguf")
        files[-1].write_bytes(content[:place])
    outcomes = open_all(files, megabytes=64)
    assert len(outcomes) >= 50
    assert {outcome.split(":")[0] for outcome in outcomes.values()} == {"CheckpointError"}


@needs_memory_limits
def test_a_mutated_file_opens_or_is_refused(tmp_path: Path) -> None:
    content = _small_model(tmp_path / "good.gguf").read_bytes()
    header = content.rindex(b"output.weight") + 40
    generator = random.Random(5)
    files = []
    for number in range(200):
        mutated = bytearray(content)
        for _ in range(generator.randint(1, 6)):
            mutated[generator.randrange(header)] = generator.randrange(256)
        files.append(tmp_path / f"{number}.gguf")
        files[-1].write_bytes(mutated)
    outcomes = open_all(files, megabytes=64)
    assert {outcome.split(":")[0] for outcome in outcomes.values()} <= {
        "opened", "CheckpointError", "UnsupportedModelError",
    }  # fmt: skip


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    scalars = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11, "d": 12}
    keys = [raw_key(code.encode(), kind, struct.pack(f"<{code}", 7)) for code, kind in scalars.items()]
    keys += [raw_key(b"array", ARRAY, raw_array(5, 3, struct.pack("<3i", -1, 0, 1))), raw_key(b"yes", 7, b"\x01")]
    keys += [raw_key(b"none", ARRAY, raw_array(STRING, 0)), raw_key(b"text", STRING, raw_string("é".encode()))]
    path = tmp_path / "values.gguf"
    path.write_bytes(raw_gguf(keys=keys, version=2))
    expected = {"array": [-1, 0, 1], "yes": True, "none": [], "text": "é"}
    assert GgufFile(path).metadata == dict.fromkeys(scalars, 7) | expected


def test_a_value_out_of_proportion_is_only_a_value(tmp_path: Path) -> None:
    path = tmp_path / "blocks.gguf"
    path.write_bytes(raw_gguf(keys=[raw_key(b"llama.block_count", U32, struct.pack("<I", 10**6))]))
    assert GgufFile(path).metadata == {"llama.block_count": 10**6}


@needs_memory_limits
def test_a_large_vocabulary_opens_in_little_memory(tmp_path: Path) -> None:
    tokens = [f"token {index}".encode() for index in range(262_144)]
    items = b"".join(map(raw_string, tokens))
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(raw_gguf(keys=[raw_key(b"tokens", ARRAY, raw_array(STRING, len(tokens), items))]))
    assert open_all([path], megabytes=100) == {str(path): "opened"}
    assert GgufFile(path).metadata["tokens"][262_143] == "token 262143"


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_the_alignment_places_the_data(tmp_path: Path, alignment: int) -> None:
    values = np.arange(16, dtype="<f4")
    content = raw_gguf(
        keys=[_aligned(alignment)], tensors=[(b"x", (8, 2), F32, 0)], data=values.tobytes(), alignment=alignment
    )
    path = tmp_path / "aligned.gguf"
    path.write_bytes(content)
    np.testing.assert_array_equal(GgufFile(path).dequantise("x"), values.reshape(2, 8))


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_tensors_equal_the_official_readers(tmp_path: Path, weight_type: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", weight_type=weight_type)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = ours.tensor(tensor.name)
        assert (stored.shape, stored.type_name) == (values.shape, tensor.tensor_type.name)
        np.testing.assert_array_equal(ours.dequantise(tensor.name), np.atleast_2d(values))
        blocks = ours.read_raw(tensor.name, slice(None))
        np.testing.assert_array_equal(blocks.reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_metadata_equals_the_official_readers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert GgufFile(path).metadata == expected


def test_some_rows_are_the_same_as_in_all_rows(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "model.gguf", weight_type="Q4_1"))
    whole = file.dequantise("output.weight")
    np.testing.assert_array_equal(file.dequantise("output.weight", slice(5, 9)), whole[5:9])
    assert file.dequantise("output.weight", slice(9, 9)).shape == (0, 64)
    with pytest.raises(IndexError, match="do not exist"):
        file.dequantise("output.weight", slice(0, len(whole) + 1))


@pytest.mark.parametrize("name", DEQUANTISED_TYPES)
def test_every_type_said_to_be_known_is(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "typed.gguf"
    path.write_bytes(raw_gguf(tensors=[(b"x", (block_values, 3), int(kind), 0)], data=bytes(3 * block_bytes)))
    assert GgufFile(path).dequantise("x").shape == (3, block_values)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "integers.gguf"
    path.write_bytes(raw_gguf(tensors=[(b"x", (4,), int(gguf.GGMLQuantizationType.I32), 0)], data=bytes(16)))
    with pytest.raises(UnsupportedModelError, match="'x' has type I32"):
        GgufFile(path).dequantise("x")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.7'"):
        file.read_raw("blk.7", slice(None))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        GgufFile(tmp_path / "nowhere.gguf")


def test_the_fixture_names_tensors_as_gguf_does(tmp_path: Path) -> None:
    names = {gguf_name(name) for name in llama_tensors(llama_config())}
    assert names == set(GgufFile(write_gguf(tmp_path / "model.gguf")).tensors)


def test_every_type_that_the_package_dequantises_is_known() -> None:
    """A newer package than 0.19 may know more than is listed here, none may know less."""
    from importlib.metadata import version

    from gguf import quants

    from topg.converter.gguf_file import DEQUANTISED_TYPES

    plain = {"F32", "F16"}  # which the package reads without a codec
    known = {kind.name for kind in quants._type_traits} | plain
    assert set(DEQUANTISED_TYPES) == known if version("gguf").startswith("0.19.") else set(DEQUANTISED_TYPES) <= known
