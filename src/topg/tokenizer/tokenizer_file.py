"""A tokenizer.json, checked before the library that runs it sees it.

The library aborts the process, or panics, on files that its parser lets through; and it cuts and fills texts where a
file says so.  What is refused or taken out here is what would do that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from topg.errors import CheckpointError, TopgError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

FILE = "tokenizer.json"
MAX_GROWTH = 256
MAX_IDS = 2**32
PARTS_OF_A_SEQUENCE = ("normalizers", "pretokenizers", "processors", "decoders")

# By how much one character can grow at most: Unicode's own bounds, and the characters that bytes are written with.
GROWTH: Mapping[str, int] = MappingProxyType(
    {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 24, "ByteLevel": 4, "Metaspace": 2}
)


@dataclass(frozen=True)
class TokenizerFile:
    """A checked tokenizer.json: its `text` without truncation and padding, and what a user should know of it."""

    text: str
    decoder: Mapping[str, Any] | None
    warnings: tuple[str, ...]

    def load(self) -> FastTokenizer:
        """The library's tokenizer; raises CheckpointError for what the library refuses."""
        from tokenizers import Tokenizer

        try:
            with PanicsAs(CheckpointError(f"{FILE} makes the tokenizers library fail; get the model's file again")):
                return Tokenizer.from_str(self.text)
        except Exception as error:  # the library raises bare Exception for whatever its parser refuses
            raise CheckpointError(f"{FILE} cannot be read: {error}") from error


class PanicsAs:
    """Within the block a panic of the library, which is no Exception in Python, becomes `error`."""

    def __init__(self, error: TopgError) -> None:
        self._error = error

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, panic: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and kind.__name__ == "PanicException":  # its class cannot be imported
            raise self._error from panic


def read_tokenizer_file(text: str) -> TokenizerFile:
    """Check a tokenizer.json; raises CheckpointError in one plain sentence."""
    data = _object(text)
    _check_vocabulary(data)
    _check_added_tokens(data)
    _check_steps(data, "normalizer", "pre_tokenizer")
    _check_steps(data, "decoder")
    for step in _steps(data.get("post_processor")):
        _check_template(step)
    limits = [name for name in ("truncation", "padding") if data.get(name) is not None]
    if limits:
        text = json.dumps(data | dict.fromkeys(limits), ensure_ascii=False)
    warnings = tuple(f"{FILE} sets {name}, which would change prompts; it is left out" for name in limits)
    return TokenizerFile(text, data.get("decoder"), warnings)


def _object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{FILE} is not valid JSON; get the model's file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{FILE} must hold an object, not {type(data).__name__}; get the model's file again")
    for name, kind in (("model", dict), ("added_tokens", list)):
        if not isinstance(data.get(name), kind):
            raise CheckpointError(f"{FILE} has no usable {name!r} part; get the model's file again")
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if not isinstance(data.get(name), dict | None):
            raise CheckpointError(f"{FILE}: {name} must be an object, not {type(data[name]).__name__}")
    return data


def _check_vocabulary(data: Mapping[str, Any]) -> None:
    vocabulary = data["model"].get("vocab")
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        raise CheckpointError(f"{FILE} has no vocabulary; get the model's file again")
    if isinstance(vocabulary, list) or _are_distinct_ids(vocabulary.values()):
        return
    owners: dict[int, str] = {}
    for token, token_id in vocabulary.items():
        _check_id(token, token_id)
        if owners.setdefault(token_id, token) != token:
            raise CheckpointError(f"{FILE} gives the id {token_id} to {owners[token_id]!r:.60} and to {token!r:.60}")


def _are_distinct_ids(values: Collection[object]) -> bool:
    """Whether all is well, told quickly: a vocabulary has a quarter of a million entries."""
    ids = cast(Collection[int], values) if set(map(type, values)) == {int} else ()
    return bool(ids) and min(ids) >= 0 and max(ids) < MAX_IDS and len(set(ids)) == len(ids)


def _check_added_tokens(data: Mapping[str, Any]) -> None:
    """Each needs a text, and an id that no other text has."""
    vocabulary = data["model"]["vocab"]
    owners = {token_id: token for token, token_id in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    for index, token in enumerate(data["added_tokens"]):
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"{FILE}: added_tokens[{index}] has no text; every added token needs one")
        _check_id(content, token.get("id"))
        owner = owners.setdefault(token["id"], content)
        if owner != content:
            raise CheckpointError(
                f"{FILE}: the added token {content!r:.60} has the id {token['id']}, which is that of {owner!r:.60}"
            )


def _check_id(token: str, token_id: object) -> None:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_IDS:
        raise CheckpointError(f"{FILE}: the token {token!r:.60} has the id {token_id!r:.40}, which is no token id")


def _check_steps(data: Mapping[str, Any], *names: str) -> None:
    """Refuse steps that would blow up a text, one after the other."""
    steps = [step for name in names for step in _steps(data.get(name))]
    growth = prod(_growth(step) for step in steps)
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{FILE}: the steps of {' and '.join(names)} can make a text {growth:.0e} times as long; "
            f"at most {MAX_GROWTH} times is allowed"
        )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a part of the file, sequences in sequences flattened."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        nested = next((step[name] for name in PARTS_OF_A_SEQUENCE if isinstance(step.get(name), list)), None)
        if nested is None:
            yield step
        else:
            waiting += reversed(nested)


def _growth(step: Mapping[str, Any]) -> int:
    """How many characters a step makes of one at most."""
    kind = step.get("type")
    if kind == "Replace":
        return _replace_growth(step)
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        return _precompiled_growth(step)
    return GROWTH.get(str(kind), 1)


def _replace_growth(step: Mapping[str, Any]) -> int:
    pattern, content = step.get("pattern"), len(str(step.get("content", "")))
    by_kind = pattern if isinstance(pattern, dict) else {}
    if not by_kind or "" in by_kind.values():
        raise CheckpointError(f"{FILE}: a Replace step looks for an empty text, which no text can be searched for")
    return max(1, content) if "Regex" not in by_kind else 1 + content


def _precompiled_growth(step: Mapping[str, Any]) -> int:
    """SentencePiece's table: the size of a search tree, the tree, and the replacements, each ended by a zero byte."""
    try:
        table = base64.b64decode(str(step.get("precompiled_charsmap", "")), validate=True)
    except ValueError as error:
        raise CheckpointError(f"{FILE}: precompiled_charsmap is not base64; get the model's file again") from error
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _check_template(step: Mapping[str, Any]) -> None:
    """A template may only name special tokens that it lists."""
    listed = step.get("special_tokens")
    if step.get("type") != "TemplateProcessing" or not isinstance(listed, dict):
        return
    pieces = [piece for name in ("single", "pair") for piece in step.get(name) or () if isinstance(piece, dict)]
    named = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
    missing = [name for name in named if name not in listed]
    if missing:
        raise CheckpointError(f"{FILE}: the post-processor writes {missing[0]!r:.60}, which it does not list")
