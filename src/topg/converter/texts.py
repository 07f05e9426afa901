"""The parts of a model that are about text: tokenizer, special tokens, chat template, recommended sampling values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from topg.converter.checks import check_special_tokens, check_vocabulary
from topg.converter.manifest import GenerationDefaults
from topg.converter.source import CheckpointSource
from topg.converter.strict_json import parse
from topg.converter.wording import listed
from topg.errors import ChatTemplateError, CheckpointError
from topg.tokenizer.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from topg.tokenizer.gguf import rebuild
from topg.tokenizer.special import NO_TOKEN, SpecialTokens, collect_gguf, collect_huggingface
from topg.tokenizer.tokenizer import Tokenizer
from topg.tokenizer.tokenizer_file import read_tokenizer_file
from topg.wording import shown


@dataclass(frozen=True)
class ModelTexts:
    """What the converted model holds besides its weights; `tokenizer_json` is a Hugging Face tokenizers file."""

    tokenizer_json: str
    tokens: SpecialTokens
    chat_template: str | None
    generation: GenerationDefaults
    warnings: tuple[str, ...]


def read_texts(checkpoint: CheckpointSource, rows: int) -> ModelTexts:
    """Read and check; `rows` is how many token ids the model knows.

    Raises CheckpointError when the tokenizer, a special token or a recommended value does not fit the model.
    """
    file = read_tokenizer_file(_tokenizer_json(checkpoint))
    tokenizer_json, warnings = _fit_tokenizer(file.text, rows)
    if checkpoint.kind == "huggingface":
        _check_ids(checkpoint.settings, "config.json", rows)
        _check_ids(checkpoint.generation, "generation_config.json", rows)
    template, template_warnings = _usable_template(checkpoint.chat_template)
    tokens = _special_tokens(checkpoint, tokenizer_json, template)
    check_special_tokens(tokens, rows)
    Tokenizer(tokenizer_json, tokens, template)  # refused now, and not when the model is first used
    generation = read_generation(checkpoint.generation)
    return ModelTexts(tokenizer_json, tokens, template, generation, file.warnings + warnings + template_warnings)


def read_generation(recommended: Mapping[str, Any]) -> GenerationDefaults:
    """Sampling values of a generation_config.json; an explicit `do_sample: false` means temperature 0."""
    where = "generation_config.json"
    known = [field.name for field in fields(GenerationDefaults)]
    values = {name: recommended[name] for name in known if recommended.get(name) is not None}
    if values.get("top_k") == -1:  # another spelling of "keep all"
        values["top_k"] = 0
    if parse(bool | None, recommended.get("do_sample"), f"{where}.do_sample") is False:  # type: ignore[arg-type]
        values["temperature"] = 0.0
    return parse(GenerationDefaults, values, where)


def _check_ids(settings: Mapping[str, Any], where: str, rows: int) -> None:
    """Every special token that these settings name is a row of the embedding, whether another file overrules it or not.

    -1 stands for "none" in published files, for all but the end tokens.
    """
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = settings.get(key)
        least = 0 if key == "eos_token_id" else NO_TOKEN
        for token in value if isinstance(value, list) and key == "eos_token_id" else [value]:
            if token is not None and (type(token) is not int or not least <= token < rows):
                raise CheckpointError(f"{where}: {key} is {shown(token)}; expected a token id from 0 to {rows - 1}")


def _usable_template(template: str | None) -> tuple[str | None, tuple[str, ...]]:
    """The template to keep, and a warning where it will not work: plain prompts need none, so the model is of use."""
    if template is None:
        return None, ()
    if len(template) > MAX_SOURCE_CHARS:
        what = f"has {len(template):,} characters, at most {MAX_SOURCE_CHARS:,} are read: it is left out"
        return None, (f"chats will not work with this model: its chat template {what}",)
    try:
        ChatTemplate(template, {}).compile()
    except ChatTemplateError as error:
        return template, (f"chats will not work with this model: {error}",)
    return template, ()


def _tokenizer_json(checkpoint: CheckpointSource) -> str:
    if checkpoint.tokenizer_file is None:
        return rebuild(checkpoint.tokenizer_settings)
    return _decoded(checkpoint.tokenizer_file.read_bytes(), str(checkpoint.tokenizer_file))


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error


def _special_tokens(checkpoint: CheckpointSource, tokenizer_json: str, template: str | None) -> SpecialTokens:
    if checkpoint.kind == "gguf":
        return collect_gguf(checkpoint.tokenizer_settings, tokenizer_json)
    return collect_huggingface(
        checkpoint.settings, checkpoint.generation, checkpoint.tokenizer_settings, tokenizer_json, template,
    )  # fmt: skip


def _fit_tokenizer(text: str, rows: int) -> tuple[str, tuple[str, ...]]:
    """The tokenizer without added tokens that the model has no row for, such as the image token of a text-only variant.

    Left in, such a token in a prompt would reach past the end of the embedding.  Tokens of the vocabulary proper must
    all have rows.
    """
    try:
        data = json.loads(text)
        added = [(token["id"], token["content"]) for token in data["added_tokens"]]
        vocabulary = _vocabulary_ids(data["model"]["vocab"])
        largest = max(vocabulary, default=0)
        rowless = [content for token, content in added if token >= rows and token not in vocabulary]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"tokenizer.json is damaged: {type(error).__name__}: {error}") from error
    check_vocabulary(largest + 1, rows)
    if not rowless:
        return text, ()
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in rowless]
    warning = f"{len(rowless)} added token(s) have no embedding and are left out of the tokenizer: {listed(rowless)}"
    return json.dumps(data, ensure_ascii=False), (warning,)


def _vocabulary_ids(vocabulary: dict[str, int] | list[Any]) -> set[int]:
    """Ids of a model's own tokens: BPE maps tokens to ids, Unigram lists them in order."""
    return set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
