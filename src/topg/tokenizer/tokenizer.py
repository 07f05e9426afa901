"""A model's tokenizer: text to ids and back, and chats to ids.

The `tokenizers` library does the splitting and merging.  What this module adds is control over special tokens:

* the begin token comes exactly once or not at all, by the model's own rule;
* `parse_special=False` treats text that looks like a special token as ordinary characters;
* in a chat only the template writes special tokens, never the content of a message (see `encode_chat`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from topg.errors import CheckpointError, RequestError
from topg.tokenizer.chat_template import ChatTemplate
from topg.tokenizer.decoding import DecoderRules
from topg.tokenizer.detokenizer import ByteLevelDetokenizer, Detokenizer, SpmDetokenizer
from topg.tokenizer.markers import MarkerQuoter, Markers
from topg.tokenizer.special import SpecialTokens
from topg.tokenizer.tokenizer_file import MAX_IDS, PanicsAs, read_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


class Tokenizer:
    """Text to ids and back.  Safe to use from several threads at once: only what was looked up is remembered."""

    def __init__(self, tokenizer_json: str, tokens: SpecialTokens, chat_template: str | None) -> None:
        """Raises CheckpointError and UnsupportedModelError for a tokenizer.json that cannot be used."""
        file = read_tokenizer_file(tokenizer_json)
        self._fast = file.load()
        self._rules = DecoderRules.from_json(file.decoder)
        added = self._fast.get_added_tokens_decoder()
        self._specials = {token_id: token.content for token_id, token in added.items() if token.special}
        self.tokens = tokens
        self._template = ChatTemplate(chat_template, self._template_names())
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | int] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return self._template.source is not None

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        The begin token is put first if the model wants one, `add_bos` allows it and the text does not begin with it
        already.  `parse_special` says whether special tokens written out in the text count as such.  An empty text
        gives the begin token or nothing.  Raises RequestError for what is no text or cannot be written as UTF-8.
        """
        _check_text(text)
        ids = self._encode_parsed(text) if parse_special else self._quoting.encode(text)
        return self._with_bos(ids) if add_bos else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.  Ids beyond the vocabulary add nothing."""
        with PanicsAs(CheckpointError("the model's tokenizer.json fails on these tokens; get the model's file again")):
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: of its text for a special token, none for an id beyond the vocabulary.

        The bytes of all tokens of a text, joined, are its UTF-8, save for a space the decoder strips at the start.
        """
        known = self._bytes.get(token_id)
        if known is None:
            text = self._token_text(token_id)
            if text is None:
                return b""
            special = token_id in self._specials
            known = self._bytes[token_id] = text.encode() if special else self._rules.bytes_of(text)
        return known

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming decoder for one sequence."""
        if self._rules.byte_level:
            return ByteLevelDetokenizer(self._shown_bytes)
        return SpmDetokenizer(self._shown_piece, self._rules.strip_start)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat.  The template is the whole prompt: a begin token comes only if the template writes one.

        `messages` are as `check_messages` returns them.  Special tokens come only from the template.  Where a text in
        `messages` holds one written out, or a piece that could become one next to other text, stand-in characters take
        the place of its first or last character while the template runs; the special tokens found in the result then
        are the template's, and everything else is encoded as ordinary text.  A chat without such text is encoded
        directly.  Raises ChatTemplateError when there is no template, or it refuses or fails.
        """
        quoter = MarkerQuoter(self._markers, [messages, self._template.source])
        rendered = self._template.render(quoter.quote(messages), add_generation_prompt)
        _check_text(rendered)
        if not quoter.used:
            return self._encode_parsed(rendered)
        return self._quoting.encode(quoter.unquote(self._quoting.mark(rendered)))

    def _encode_parsed(self, text: str) -> list[int]:
        return _encode(self._fast, text)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokens.bos
        if not self.tokens.add_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def _template_names(self) -> dict[str, str]:
        """Texts of special tokens under the names templates use."""
        named = {"bos_token": self.tokens.bos, "pad_token": self.tokens.pad, "unk_token": self.tokens.unk}
        named["eos_token"] = self.tokens.eos[0] if self.tokens.eos else None
        texts = {name: self._fast.id_to_token(token_id) for name, token_id in named.items() if token_id is not None}
        return {name: text for name, text in texts.items() if text is not None}

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._specials else self.token_bytes(token_id)

    def _shown_piece(self, token_id: int) -> str | int | None:
        """For SPM-like tokenizers: a token's text, or its byte; None for what is not shown."""
        known = self._pieces.get(token_id)
        if known is None:
            text = None if token_id in self._specials else self._token_text(token_id)
            if text is None:
                return None
            piece = self._rules.text_of(text)
            byte = self._rules.byte_of(piece)
            known = self._pieces[token_id] = piece if byte is None else byte
        return known

    def _token_text(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for ids that no token has."""
        return self._fast.id_to_token(token_id) if 0 <= token_id < MAX_IDS else None

    @cached_property
    def _quoting(self) -> _QuotingEncoder:
        return _QuotingEncoder(self._fast, self._specials, self._markers)

    @cached_property
    def _markers(self) -> Markers:
        return Markers(self._specials.values())


class _QuotingEncoder:
    """Encodes text in which special tokens written out are ordinary characters, and only marked ones count.

    It is a copy of the tokenizer that skips its special tokens and has one more added token for each: a mark that
    nobody outside can write, because it holds a random number drawn at start.  Apart from that it splits, normalises
    and merges like the original, so text around the special tokens gets the same ids.
    """

    def __init__(self, fast: FastTokenizer, specials: Mapping[int, str], markers: Markers) -> None:
        self._markers = markers
        self._fast = deepcopy(fast)
        self._fast.encode_special_tokens = True
        nonce = secrets.token_hex(8)
        self._marks = {text: f"\ue000{nonce}:{token_id}\ue001" for token_id, text in specials.items()}
        self._special_of = self._add_marks(fast, specials)

    def mark(self, text: str) -> str:
        """`text` with each special token replaced by its mark, as the original tokenizer would find them."""
        return self._markers.replace(text, self._marks.__getitem__)

    def encode(self, text: str) -> list[int]:
        """Ids of a text with marks."""
        return [self._special_of.get(token_id, token_id) for token_id in _encode(self._fast, text)]

    def _add_marks(self, fast: FastTokenizer, specials: Mapping[int, str]) -> dict[int, int]:
        """Give every mark the matching rules of its special token; returns mark id -> special id."""
        from tokenizers import AddedToken

        added = fast.get_added_tokens_decoder()
        rules = ("single_word", "lstrip", "rstrip", "normalized")
        self._fast.add_tokens(
            [
                AddedToken(self._marks[text], special=False, **{rule: getattr(added[token_id], rule) for rule in rules})
                for token_id, text in specials.items()
            ]
        )
        ids = self._fast.get_vocab(with_added_tokens=True)
        return {ids[self._marks[text]]: token_id for token_id, text in specials.items()}


def _encode(fast: FastTokenizer, text: str) -> list[int]:
    failure = "the model's tokenizer.json fails on this text; change the text, or use another model"
    with PanicsAs(RequestError(failure, "prompt")):
        return list(fast.encode(text, add_special_tokens=False).ids)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be a text, not {type(text).__name__}", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which is no "
            "Unicode text; send whole characters",
            "prompt",
        ) from error
