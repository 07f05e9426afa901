"""From checkpoint to converted model: right weights, checked inputs, and an output that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.checkpoints import (
    SPECIAL_TOKENS,
    VOCAB,
    Floats,
    as_bfloat16,
    gguf_name,
    llama_config,
    llama_tensors,
    write_gguf,
    write_huggingface,
)
from support.peak_memory import PRINT_PEAK
from topg.converter import ModelConverter
from topg.converter import weights as weights_module
from topg.converter.convert import Conversion
from topg.converter.format import ConvertedModel
from topg.converter.texts import read_generation
from topg.converter.weights import write_weights
from topg.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    PrecisionError,
    TopgError,
    UnsupportedModelError,
)
from topg.precision.quantise import dequantise
from topg.precision.recipes import KEEP, RECIPE_NAMES, RECIPES

Tensors = dict[str, Floats]

HIDDEN = 64
NORM_EPS = 2.0**-17  # the same number in a GGUF, which keeps it as float32
HUGGINGFACE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def make_tensors() -> Tensors:
    return llama_tensors(llama_config())


def write_folder(folder: Path, tensors: Tensors, dtype: str = "float32", **config: Any) -> Path:
    """The tiny Llama with these weights; keyword arguments change its config.json."""
    settings = llama_config(rms_norm_eps=NORM_EPS) | config
    return write_huggingface(folder, config=settings, tensors=tensors, dtype=dtype, generation={})


def write_file(path: Path, tensors: Tensors, weight_type: str = "F32", **config: Any) -> Path:
    """The same as a GGUF file."""
    settings = llama_config(rms_norm_eps=NORM_EPS) | config
    return write_gguf(path, config=settings, tensors=tensors, weight_type=weight_type)


def source_name(name: str) -> str:
    """The checkpoint's name of a converted tensor."""
    if not name.startswith("layers."):
        return HUGGINGFACE_NAMES[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{HUGGINGFACE_NAMES[module]}.{kind}"


def values_of(model: ConvertedModel) -> dict[str, np.ndarray]:
    """Every tensor in float32, by the checkpoint's names."""
    return {
        source_name(name): dequantise(model.parts(name), model.precision(name), model.shape(name))
        for name in model.plan.tensor_names
    }


def convert(source: Path, output: Path, recipe: str = "float32", **options: Any) -> ConvertedModel:
    return ConvertedModel.open(ModelConverter(source, output, recipe, **options).convert())


def run(source: Path, output: Path, recipe: str = "float32") -> Conversion:
    return ModelConverter(source, output, recipe).run()


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return make_tensors()


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return write_folder(tmp_path_factory.mktemp("huggingface") / "tiny", tensors)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return write_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tensors)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_recipe_converts_and_reopens(huggingface: Path, tmp_path: Path, tensors: Tensors, recipe: str) -> None:
    model = convert(huggingface, tmp_path / "model", recipe)
    model.verify()
    assert model.manifest.recipe == recipe
    for name, record in model.manifest.tensors.items():
        if recipe != KEEP:
            assert record.precision == RECIPES[recipe].precision(record.role), name
    for name, values in values_of(model).items():
        error = np.linalg.norm(values - tensors[name]) / np.linalg.norm(tensors[name])
        assert error <= {"float32": 0, KEEP: 0, "bfloat16": 0.003, "int4": 0.12}.get(recipe, 0.01), name


def test_gguf_and_huggingface_give_the_same_model(huggingface: Path, gguf_file: Path, tmp_path: Path) -> None:
    """Weights, plan and special tokens; the GGUF keeps query and key rows in another order."""
    left, right = convert(huggingface, tmp_path / "left", "int8"), convert(gguf_file, tmp_path / "right", "int8")
    assert left.plan == right.plan
    assert left.manifest.tensors == right.manifest.tensors
    assert left.manifest.tokens == right.manifest.tokens
    for name in left.plan.tensor_names:
        for part, values in left.parts(name).items():
            np.testing.assert_array_equal(values, right.part(name, part), err_msg=f"{name} {part}")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_keep_takes_a_gguf_over_bit_by_bit(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    """Against the reader and the arithmetic of the gguf package, rows of query and key put back in order."""
    path = write_file(tmp_path / "tiny.gguf", tensors, kind)
    model = convert(path, tmp_path / "model", KEEP)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, values in values_of(model).items():
        tensor = stored[gguf_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        if "q_proj" in name or "k_proj" in name:
            expected = expected.reshape(-1, 8, 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(values, expected, err_msg=name)
    weights = model.manifest.tensors["layers.0.attention.query.weight"]
    assert weights.precision.grouped == kind.startswith("Q")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_keep_takes_16_bit_floats_over(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    model = convert(write_folder(tmp_path / "source", tensors, kind), tmp_path / "model", KEEP)
    for name, values in values_of(model).items():
        exact = as_bfloat16(tensors[name]) if kind == "bfloat16" else tensors[name].astype(np.float16)
        np.testing.assert_array_equal(values, exact.astype(np.float32))
    for record in model.manifest.tensors.values():
        assert record.precision.weights == ("float32" if record.role == "norm" else kind)


def test_blocks_and_files_leave_no_trace(huggingface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and many files give the same weights as one block a tensor."""
    whole = convert(huggingface, tmp_path / "whole", "int4")
    monkeypatch.setattr(weights_module, "BLOCK_BYTES", 5 * HIDDEN * 4)
    monkeypatch.setattr(write_weights, "__defaults__", (30_000,))
    pieces = convert(huggingface, tmp_path / "pieces", "int4")
    assert len(pieces.manifest.weight_files) > 3
    sizes = [(pieces.folder / name).stat().st_size for name in pieces.manifest.weight_files]
    assert max(sizes) < 40_000
    pieces.verify()
    for name in whole.plan.tensor_names:
        for part, values in whole.parts(name).items():
            np.testing.assert_array_equal(values, pieces.part(name, part))


def test_the_same_source_gives_the_same_bytes(huggingface: Path, tmp_path: Path) -> None:
    hashes = []
    for place in ("one", "two"):
        folder = convert(huggingface, tmp_path / place / "model", "int8").folder
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert hashes[0] == hashes[1]


def test_hashes_of_source_and_output_are_recorded(huggingface: Path, tmp_path: Path) -> None:
    model = convert(huggingface, tmp_path / "model")
    for folder, files in ((huggingface, model.manifest.source.files), (model.folder, model.manifest.files)):
        assert files
        for name, digest in files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_fused_query_key_value_is_taken_apart(tmp_path: Path) -> None:
    """GPT-NeoX keeps [head][query, key, value][head size] rows in one tensor."""
    rng = np.random.default_rng(1)
    hidden, heads, vocab = 64, 4, VOCAB
    block = {
        "input_layernorm.weight": (hidden,), "input_layernorm.bias": (hidden,),
        "post_attention_layernorm.weight": (hidden,), "post_attention_layernorm.bias": (hidden,),
        "attention.query_key_value.weight": (3 * hidden, hidden), "attention.query_key_value.bias": (3 * hidden,),
        "attention.dense.weight": (hidden, hidden), "attention.dense.bias": (hidden,),
        "mlp.dense_h_to_4h.weight": (128, hidden), "mlp.dense_h_to_4h.bias": (128,),
        "mlp.dense_4h_to_h.weight": (hidden, 128), "mlp.dense_4h_to_h.bias": (hidden,),
        "attention.rotary_emb.inv_freq": (2,), "attention.masked_bias": (1,), "attention.bias": (1, 1, 4, 4),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"gpt_neox.layers.0.{name}": shape for name, shape in block.items()}
    shapes |= {"gpt_neox.embed_in.weight": (vocab, hidden), "embed_out.weight": (vocab, hidden)}
    shapes |= {"gpt_neox.final_layer_norm.weight": (hidden,), "gpt_neox.final_layer_norm.bias": (hidden,)}
    stored = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    source = write_folder(
        tmp_path / "source", stored, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"], num_hidden_layers=1,
        layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000, hidden_act="gelu", attention_bias=True,
    )  # fmt: skip
    conversion = run(source, tmp_path / "model")
    model = ConvertedModel.open(tmp_path / "model")
    fused = stored["gpt_neox.layers.0.attention.query_key_value.weight"].reshape(heads, 3, hidden // heads, hidden)
    fused_bias = stored["gpt_neox.layers.0.attention.query_key_value.bias"].reshape(heads, 3, hidden // heads)
    for index, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(
            model.part(f"layers.0.attention.{name}.weight", "values"), fused[:, index].reshape(-1, hidden)
        )
        np.testing.assert_array_equal(
            model.part(f"layers.0.attention.{name}.bias", "values"), fused_bias[:, index].reshape(-1)
        )
    assert [text for text in conversion.warnings if text.startswith("3 stored buffer(s) are left out")]


# ---- head and embedding ---------------------------------------------------------------------------------------------


def _without_head(tensors: Tensors) -> Tensors:
    return {name: values for name, values in tensors.items() if name != "lm_head.weight"}


def test_tied_without_head(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", _without_head(tensors), tie_word_embeddings=True)
    conversion = run(source, tmp_path / "model")
    model = ConvertedModel.open(tmp_path / "model")
    assert "head.weight" not in model.plan.tensor_names and model.plan.tensor_names[0] == "embed.weight"
    assert conversion.warnings == ()


def test_tied_with_the_same_head_stores_one_tensor(tmp_path: Path, tensors: Tensors) -> None:
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    source = write_folder(tmp_path / "source", same, tie_word_embeddings=True)
    conversion = run(source, tmp_path / "model")
    assert "head.weight" not in ConvertedModel.open(tmp_path / "model").plan.tensor_names
    assert conversion.warnings == ()


def test_tied_with_another_head_uses_it_and_says_so(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", tensors, tie_word_embeddings=True)
    conversion = run(source, tmp_path / "model")
    model = ConvertedModel.open(tmp_path / "model")
    np.testing.assert_array_equal(model.part("head.weight", "values"), tensors["lm_head.weight"])
    assert len(conversion.warnings) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in conversion.warnings[0]


def test_untied_without_head_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", _without_head(tensors))
    with pytest.raises(CheckpointError, match=r'no head \(lm_head\.weight\).*"tie_word_embeddings": true'):
        run(source, tmp_path / "model")


def test_a_gguf_without_output_is_tied(tmp_path: Path, tensors: Tensors) -> None:
    model = convert(write_file(tmp_path / "tiny.gguf", _without_head(tensors)), tmp_path / "model")
    assert "head.weight" not in model.plan.tensor_names


# ---- refusals -------------------------------------------------------------------------------------------------------


def _refused(source: Path, output: Path, error: type[TopgError], message: str, recipe: str = "int8") -> None:
    """The conversion fails with this message, and nothing of it stays on the disk."""
    output.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=message):
        run(source, output, recipe)
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("recipe", ["float32", "int8", "int4", "bfloat16", KEEP])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, recipe: str) -> None:
    tensors = make_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"][3, 70] = value
    source = write_folder(tmp_path / "source", tensors)
    _refused(source, tmp_path / "out" / "model", CheckpointError,
             r"model\.layers\.1\.mlp\.down_proj\.weight holds -?(nan|inf) at position \[3, 70\]", recipe)  # fmt: skip


def test_scales_of_a_gguf_that_are_not_finite_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    path = write_file(tmp_path / "tiny.gguf", tensors, "Q8_0")
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # a float16 that is not a number
    path.write_bytes(data)
    for recipe in (KEEP, "int8"):
        _refused(path, tmp_path / "out" / "model", CheckpointError, r"tensor blk\.1\.ffn_down\.weight", recipe)


def test_values_too_large_for_the_recipe_name_the_tensor(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 3e38
    source = write_folder(tmp_path / "source", tensors)
    message = r"tensor model\.layers\.0\.mlp\.up_proj\.weight"
    _refused(source, tmp_path / "out" / "model", PrecisionError, message, "int4")


def _extra(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}


def _lacking(tensors: Tensors) -> Tensors:
    return {name: values for name, values in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}


def _misshapen(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.1.mlp.up_proj.weight": np.ones((HIDDEN, 128), np.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_extra, r"does not use: 'model\.layers\.0\.self_attn\.q_norm\.weight"),
        (_lacking, r"lacks 1 tensor\(s\).*model\.layers\.1\.mlp\.up_proj\.weight"),
        (_misshapen, r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[64, 128\]; expected \[128, 64\]"),
    ],
)
def test_tensors_must_be_those_of_the_config(
    tmp_path: Path, tensors: Tensors, change: Callable[[Tensors], Tensors], message: str
) -> None:
    source = write_folder(tmp_path / "source", change(tensors))
    _refused(source, tmp_path / "out" / "model", CheckpointError, message)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"num_hidden_layers": 3}, r"lacks \d+ tensor"),
        ("config.json", {"num_hidden_layers": 1}, r"does not use: 'model\.layers\.1"),
        ("config.json", {"num_hidden_layers": 10**6}, r"num_hidden_layers|layers"),
        ("config.json", {"vocab_size": 300}, r"model\.embed_tokens\.weight has shape \[320, 64\]; expected \[300"),
        ("config.json", {"eos_token_id": 320}, r"eos.* is 320"),
        ("config.json", {"architectures": "LlamaForCausalLM"}, r"architectures must be a list"),
        ("generation_config.json", {"temperature": "hot"}, r"generation_config\.json\.temperature must be float"),
        ("generation_config.json", {"top_p": 1.5}, r"top_p"),
        ("tokenizer.json", {"model": {}}, r"tokenizer\.json"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: Tensors, file: str, change: dict[str, Any], message: str
) -> None:
    source = write_folder(tmp_path / "source", tensors)
    data = json.loads((source / file).read_text()) | change
    (source / file).write_text(json.dumps(data))
    _refused(source, tmp_path / "out" / "model", TopgError, message)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    config = llama_config(vocab_size=200)
    source = write_folder(tmp_path / "source", llama_tensors(config), vocab_size=200)
    _refused(source, tmp_path / "out" / "model", CheckpointError, r"tokens, but the model has only 200 embedding rows")


def test_added_tokens_without_a_row_leave_the_tokenizer(tmp_path: Path, tensors: Tensors) -> None:
    """A text-only variant whose tokenizer still knows the image token of its family."""
    source = write_folder(tmp_path / "source", tensors)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": VOCAB, "content": "<image>"})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    conversion = run(source, tmp_path / "model")
    assert any("left out of the tokenizer: '<image>'" in text for text in conversion.warnings)
    kept = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in kept] == list(SPECIAL_TOKENS)


def test_types_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    """IQ4_NL has no counterpart among ToPG's formats."""
    path = write_file(tmp_path / "tiny.gguf", make_tensors(), "Q8_0")
    data = path.read_bytes()
    reader = gguf.GGUFReader(path)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    kind_at = tensor.field.offset + int(sum(part.nbytes for part in tensor.field.parts[:4]))
    number = int(gguf.GGMLQuantizationType.IQ4_NL)
    path.write_bytes(data[:kind_at] + number.to_bytes(4, "little") + data[kind_at + 4 :])
    message = r"token_embd\.weight has type IQ4_NL.*cannot be kept"
    _refused(path, tmp_path / "out" / "model", PrecisionError, message, KEEP)


def test_an_absurd_gguf_fails_small(tmp_path: Path, tensors: Tensors) -> None:
    path = write_file(tmp_path / "tiny.gguf", tensors, num_hidden_layers=10**6)
    _refused(path, tmp_path / "out" / "model", CheckpointError, "1000000")
    script = f"""
from topg.converter import ModelConverter
from topg.errors import CheckpointError
try:
    ModelConverter({str(path)!r}, {str(tmp_path / "never")!r}, resolve=__import__("pathlib").Path).convert()
except CheckpointError:
    {PRINT_PEAK}
"""
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    assert int(process.stdout) < 200 * 1024


@pytest.mark.parametrize("recipe", ["int8", KEEP])
def test_types_that_cannot_be_read_are_refused_before_the_weights(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    wide: Any = {"lm_head.weight": tensors["lm_head.weight"].astype(np.float64)}
    source = write_folder(tmp_path / "source", tensors | wide)
    monkeypatch.setattr(weights_module, "SafetensorsWriter", None)
    error = PrecisionError if recipe == KEEP else UnsupportedModelError
    _refused(source, tmp_path / "out" / "model", error, r"lm_head\.weight.* has type float64", recipe)


@pytest.mark.parametrize("recipe", ["int3", "", "INT8"])
def test_unknown_recipes_are_refused_at_once(tmp_path: Path, recipe: str) -> None:
    with pytest.raises(PrecisionError, match="no recipe is called"):
        ModelConverter(tmp_path / "nowhere", tmp_path / "model", recipe)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere", tmp_path / "out" / "model", ModelNotFoundError, "nowhere")


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({}, {}),
        ({"temperature": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "max_length": 20},
         {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}),
        ({"top_k": -1, "temperature": None}, {"top_k": 0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
    ],
)  # fmt: skip
def test_recommended_sampling_values(recommended: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_generation(recommended).given == expected


# ---- output ---------------------------------------------------------------------------------------------------------


def test_an_existing_output_is_refused(huggingface: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        run(huggingface, tmp_path / "model")
    with pytest.raises(ConfigError, match="is not a converted model and is not overwritten"):
        ModelConverter(huggingface, tmp_path / "model", overwrite=True).convert()
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_a_converted_model_is_overwritten_when_asked(huggingface: Path, tmp_path: Path) -> None:
    convert(huggingface, tmp_path / "model", "int8")
    with pytest.raises(ConfigError, match="exists already"):
        convert(huggingface, tmp_path / "model", "int4")
    assert convert(huggingface, tmp_path / "model", "int4", overwrite=True).manifest.recipe == "int4"
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"also holds 'notes\.txt'"):
        convert(huggingface, tmp_path / "model", "int8", overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_link_to_a_model_is_not_overwritten(huggingface: Path, tmp_path: Path) -> None:
    convert(huggingface, tmp_path / "model", "int8")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ConfigError, match="link is a symbolic link and is not overwritten"):
        convert(huggingface, tmp_path / "link", "int4", overwrite=True)
    assert ConvertedModel.open(tmp_path / "link").manifest.recipe == "int8"


def test_text_of_any_kind_survives(tmp_path: Path, tensors: Tensors) -> None:
    """A template with a lone surrogate, which JSON can escape but UTF-8 cannot hold."""
    source = write_folder(tmp_path / "source", tensors)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "é\ud800"}))
    assert convert(source, tmp_path / "model").manifest.chat_template == "é\ud800"


@pytest.mark.parametrize(
    ("template", "said", "kept"),
    [("x" * (2 << 20), "its chat template has 2,097,152 characters", False), ("{% if %}", "line 1", True)],
)
@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_a_template_that_will_not_work_is_said(
    tmp_path: Path, tensors: Tensors, kind: str, template: str, said: str, kept: bool
) -> None:
    if kind == "gguf":
        source = write_gguf(tmp_path / "tiny.gguf", tensors=tensors, metadata={"tokenizer.chat_template": template})
    else:
        source = write_folder(tmp_path / "source", tensors)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    conversion = run(source, tmp_path / "out" / "model")
    (warning,) = [text for text in conversion.warnings if text.startswith("chats will not work with this model: ")]
    assert said in warning and len(warning) < 500
    assert ConvertedModel.open(conversion.path).manifest.chat_template == (template if kept else None)


def test_a_tokenizer_that_the_library_refuses_is_refused_before_the_weights(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", tensors)
    data = json.loads((source / "tokenizer.json").read_text())
    data["decoder"] = {"type": "Twist"}
    (source / "tokenizer.json").write_text(json.dumps(data))
    _refused(source, tmp_path / "out" / "model", TopgError, "tokenizer.json")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("pad_token_id", 320), ("pad_token_id", 1.5), ("pad_token_id", "0"), ("bos_token_id", True),
     ("bos_token_id", -2), ("eos_token_id", [2, 999]), ("eos_token_id", -1), ("pad_token_id", [0])],
)  # fmt: skip
def test_token_ids_are_whole_and_within_the_vocabulary(
    tmp_path: Path, tensors: Tensors, file: str, key: str, value: Any
) -> None:
    source = write_folder(tmp_path / "source", tensors)
    settings = json.loads((source / file).read_text())
    (source / file).write_text(json.dumps(settings | {key: value}))
    _refused(source, tmp_path / "out" / "model", CheckpointError, rf"{file}: {key} is .*; expected a token id from 0")


def test_a_padding_id_of_minus_one_is_none(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", tensors, pad_token_id=-1, bos_token_id=-1)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = convert(source, tmp_path / "model").manifest.tokens
    assert tokens.pad is None and tokens.bos is None


def test_a_converted_model_is_no_source(huggingface: Path, tmp_path: Path) -> None:
    convert(huggingface, tmp_path / "model", "int8")
    _refused(tmp_path / "model", tmp_path / "out" / "again", CheckpointError, "is a converted model already")


def test_names_out_of_a_file_are_bounded_in_messages(tmp_path: Path, tensors: Tensors) -> None:
    source = write_folder(tmp_path / "source", tensors | {"\x1b[2J" + "x" * 60_000: tensors["model.norm.weight"]})
    with pytest.raises(CheckpointError, match="does not use") as caught:
        convert(source, tmp_path / "model")
    assert len(str(caught.value)) < 500 and "\x1b" not in str(caught.value)


def test_a_failed_overwrite_keeps_the_old_model(huggingface: Path, tmp_path: Path) -> None:
    convert(huggingface, tmp_path / "model", "int8")
    tensors = make_tensors()
    tensors["lm_head.weight"][0, 0] = np.nan
    damaged = write_folder(tmp_path / "damaged", tensors)
    with pytest.raises(CheckpointError):
        convert(damaged, tmp_path / "model", "int4", overwrite=True)
    assert ConvertedModel.open(tmp_path / "model").manifest.recipe == "int8"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["damaged", "model"]


def test_progress_runs_from_first_to_last_byte(huggingface: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = convert(huggingface, tmp_path / "model", progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {model.manifest.nbytes}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == model.manifest.nbytes


def test_names_are_resolved(huggingface: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def resolve(name: str) -> Path:
        asked.append(name)
        return huggingface

    path = ModelConverter(hf_model_name="org/tiny", output_dir=tmp_path / "model", resolve=resolve).convert()
    assert asked == ["org/tiny"]
    assert ConvertedModel.open(path).manifest.source.name == "tiny"


def test_a_small_disk_is_noticed_before_work(
    huggingface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    _refused(huggingface, tmp_path / "out" / "model", CapacityError, "its disk has 100 kB free")


# ---- interruptions --------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _start(source: Path, output: Path, progress: str, before: str = "") -> subprocess.Popen[str]:
    """A conversion in another process that runs `progress` whenever a block was stored."""
    script = f"""
import resource, sys, time
from pathlib import Path
from topg.converter import ModelConverter
{before}
def progress(done, total):
    {progress}
ModelConverter(Path({str(source)!r}), {str(output)!r}, "int8", progress=progress).convert()
"""
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    )


WAIT = "print(done, flush=True) or time.sleep(60)"


@pytest.mark.slow
def test_a_killed_run_leaves_no_model_and_the_next_one_cleans_up(huggingface: Path, tmp_path: Path) -> None:
    process = _start(huggingface, tmp_path / "model", WAIT)
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.communicate()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".model.lock", ".model.partial"]
    convert(huggingface, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(huggingface: Path, tmp_path: Path) -> None:
    process = _start(huggingface, tmp_path / "model", WAIT)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_nothing(huggingface: Path, tmp_path: Path) -> None:
    """The system refuses to let a file grow beyond 50 kB, as it would on a full disk."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    process = _start(huggingface, tmp_path / "model", "pass", before=limit)
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "topg.errors.CapacityError: no room left while writing" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """164 MB of weights in float32, two tensors of 82 MB, take no more than 100 MB above the bare process."""
    vocab = 160_000
    tensors = llama_tensors(llama_config(vocab_size=vocab, hidden_size=128))
    size = sum(values.nbytes for values in tensors.values())
    source = write_folder(tmp_path / "source", tensors, vocab_size=vocab, hidden_size=128)
    assert size > 150e6
    process = _start(source, tmp_path / "model", PRINT_PEAK, before="import topg.converter.convert\n" + PRINT_PEAK)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    peaks = [int(line) for line in output.split()]
    assert max(peaks) - peaks[0] < 100 * 1024, f"{peaks[0]} -> {max(peaks)} KiB for {size} bytes"
