"""Which token ids mean "begin", "end", "padding", "unknown", and which ids a chat template writes itself.

A checkpoint names these in up to four places that need not agree.  End tokens are joined (stopping too late is worse
than stopping at any token some file calls an end); for the others the tokenizer's own word comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from topg.errors import CheckpointError, UnsupportedModelError
from topg.tokenizer.tokenizer_file import PanicsAs, read_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

NO_TOKEN = -1  # some configs write this for "there is none"
PROBE = "a"  # any text a tokenizer can encode; shows what the post-processor puts around it


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens by id; None or an empty tuple where the model has none.

    `add_bos`: a plain prompt begins with `bos`.  `eos` lists every id that ends generation, the tokenizer's own first.
    `chat_markers` are the special tokens written out in the chat template.
    """

    bos: int | None
    add_bos: bool
    eos: tuple[int, ...]
    pad: int | None
    unk: int | None
    chat_markers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.add_bos and self.bos is None:
            raise CheckpointError("the tokenizer is to add a begin token, but the model names none; set its bos token")

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives equal tokens back."""
        return asdict(self) | {"eos": list(self.eos), "chat_markers": list(self.chat_markers)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpecialTokens:
        """Check and rebuild; raises CheckpointError naming the key at fault."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            odd = sorted(set(data) ^ names)
            raise CheckpointError(f"special tokens: missing or unknown keys {odd}; the keys are {sorted(names)}")
        if not isinstance(data["add_bos"], bool):
            raise CheckpointError(f"special tokens: add_bos must be true or false, not {data['add_bos']!r}")
        return cls(
            bos=_optional_id(data["bos"], "bos"),
            add_bos=data["add_bos"],
            eos=tuple(_ids(data["eos"], "eos")),
            pad=_optional_id(data["pad"], "pad"),
            unk=_optional_id(data["unk"], "unk"),
            chat_markers=tuple(_ids(data["chat_markers"], "chat_markers")),
        )


def collect_huggingface(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    tokenizer_config: Mapping[str, Any] | None,
    tokenizer_json: str,
    chat_template: str | None,
) -> SpecialTokens:
    """Special tokens of a Hugging Face folder, from its parsed files (None where a file is absent).

    `tokenizer_json` is the text of tokenizer.json.  Whether a begin token is added is read off the tokenizer's
    post-processor; a post-processor may also write nothing, then `add_bos_token` of tokenizer_config.json counts.
    An end token that a post-processor would append is left out: a prompt that is to be continued must not end.
    Raises CheckpointError for what is no id and for tokens the tokenizer does not know, UnsupportedModelError for a
    post-processor that writes more than one token before the text.  Whether the model has the ids is not looked at.
    """
    fast = read_tokenizer_file(tokenizer_json).load()
    named = tokenizer_config or {}
    generation = generation_config or {}
    own = {key: _named_id(fast, named, key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    bos, add_bos = _huggingface_bos(fast, named, own["bos_token"], _config_id(config, "bos_token_id"))
    return SpecialTokens(
        bos=bos,
        add_bos=add_bos,
        eos=_union(own["eos_token"], config.get("eos_token_id"), generation.get("eos_token_id")),
        pad=own["pad_token"] if "pad_token" in named else _config_id(config, "pad_token_id"),
        unk=own["unk_token"],
        chat_markers=_markers(fast, chat_template),
    )


def collect_gguf(metadata: Mapping[str, Any], tokenizer_json: str) -> SpecialTokens:
    """Special tokens of a GGUF file, from its metadata and the tokenizer.json rebuilt from it.

    End tokens are the ids the file itself names as end of text, of a turn or of a message.  Where SPM files name no
    ids, the format's defaults hold (begin 1, end 2, unknown 0); where `add_bos_token` is absent, the default of the
    tokenizer kind: true for SPM and for the llama3 and tekken pre-tokenizers, false for other BPE.
    """
    from topg.tokenizer.gguf import adds_bos_by_default

    fast = read_tokenizer_file(tokenizer_json).load()
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    bos = _gguf_id(metadata, "bos_token_id", 1 if spm else None)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default(metadata) and bos is not None)
    if not isinstance(add_bos, bool):
        raise CheckpointError(f"tokenizer.ggml.add_bos_token must be true or false, not {add_bos!r:.60}")
    if add_bos and bos is None:
        raise CheckpointError("tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id")
    return SpecialTokens(
        bos=bos,
        add_bos=add_bos,
        eos=_union(
            _gguf_id(metadata, "eos_token_id", 2 if spm else None),
            _gguf_id(metadata, "eot_token_id"),
            _gguf_id(metadata, "eom_token_id"),
        ),
        pad=_gguf_id(metadata, "padding_token_id"),
        unk=_gguf_id(metadata, "unknown_token_id", 0 if spm else None),
        chat_markers=_markers(fast, _gguf_template(metadata)),
    )


def _huggingface_bos(
    fast: FastTokenizer, named: Mapping[str, Any], own: int | None, configured: int | None
) -> tuple[int | None, bool]:
    """The begin token and whether prompts get it."""
    prefix = _post_processor_prefix(fast)
    if len(prefix) > 1:
        raise UnsupportedModelError(f"the tokenizer writes {prefix} before every text; at most one token is supported")
    if prefix:
        return prefix[0], True
    bos = own if "bos_token" in named else configured
    wanted = named.get("add_bos_token") is True and fast.post_processor is None
    return bos, wanted


def _post_processor_prefix(fast: FastTokenizer) -> list[int]:
    """The ids that the tokenizer writes before a text."""
    with PanicsAs(CheckpointError("tokenizer.json makes the tokenizers library fail; get the model's file again")):
        bare = fast.encode(PROBE, add_special_tokens=False).ids
        full = fast.encode(PROBE, add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    raise UnsupportedModelError("the tokenizer's post-processor changes the text's own tokens; it may only add some")


def _named_id(fast: FastTokenizer, named: Mapping[str, Any], key: str) -> int | None:
    """The id of a token that tokenizer_config.json names by its text."""
    value = named.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise CheckpointError(f"tokenizer_config.json: {key} must be a text, not {text!r}")
    token_id = fast.token_to_id(text)
    if token_id is None:
        raise CheckpointError(f"tokenizer_config.json names {text!r} as {key}, but tokenizer.json has no such token")
    return int(token_id)


def _markers(fast: FastTokenizer, chat_template: str | None) -> tuple[int, ...]:
    added = fast.get_added_tokens_decoder()
    template = chat_template or ""
    return tuple(sorted(token_id for token_id, token in added.items() if token.special and token.content in template))


def _config_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return None if value == NO_TOKEN else _optional_id(value, key)


def _gguf_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError(f"tokenizer.chat_template must be a text, not {type(template).__name__}")


def _gguf_id(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    return _optional_id(metadata.get(f"tokenizer.ggml.{name}", default), f"tokenizer.ggml.{name}")


def _union(*sources: Any) -> tuple[int, ...]:
    """Ids of all sources (an id, a list of ids, None), first mention first."""
    return tuple(dict.fromkeys(token_id for source in sources for token_id in _ids(source, "eos_token_id")))


def _ids(value: Any, name: str) -> Iterable[int]:
    values = value if isinstance(value, list | tuple) else [value]
    found = (_optional_id(item, name) for item in values)
    return [token_id for token_id in found if token_id is not None]


def _optional_id(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{name} must be a token id (0 or more), not {value!r}")
    return value
