from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from support.tokenizers import byte_level_json, spm_json
from topg.errors import UnsupportedModelError
from topg.tokenizer.decoding import DecoderRules
from topg.tokenizer.special import SpecialTokens
from topg.tokenizer.tokenizer import Tokenizer

NO_TOKENS = SpecialTokens(bos=None, add_bos=False, eos=(2,), pad=None, unk=None, chat_markers=())
SOURCES = {"byte-level": byte_level_json(), "spm": spm_json(), "spm without prefix": spm_json(prefix_space=False)}
TOKENIZERS = {name: Tokenizer(source, NO_TOKENS, None) for name, source in SOURCES.items()}


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", SOURCES)
@given(st.lists(st.one_of(st.integers(0, 340), st.integers(3, 258)), max_size=40))
def test_pieces_join_to_the_whole(name: str, ids: list[int]) -> None:
    whole = FastTokenizer.from_str(SOURCES[name]).decode(ids, skip_special_tokens=True)
    assert "".join(stream(TOKENIZERS[name], ids)) == whole == TOKENIZERS[name].decode(ids)


@pytest.mark.parametrize("name", SOURCES)
@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30))
def test_text_never_holds_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = stream(tokenizer, tokenizer.encode(text, parse_special=False))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces) or "�" in text


def test_character_cut_at_the_end_becomes_one_replacement() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [3 + byte for byte in range(256)]
    table = {tokenizer.token_bytes(token_id): token_id for token_id in ids}
    cut = [table[bytes([byte])] for byte in "🙂".encode()[:3]]
    assert stream(tokenizer, cut) == ["", "", "", "�"]


def test_invalid_run_of_byte_tokens_is_replaced_byte_by_byte() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = [3 + byte for byte in (*"é".encode(), 0xFF)]
    assert stream(tokenizer, ids) == ["", "", "", "���"] == [*[""] * 3, tokenizer.decode(ids)]


def test_special_tokens_are_skipped_and_do_not_end_a_character() -> None:
    tokenizer = TOKENIZERS["spm"]
    first, second = "é".encode()
    assert "".join(stream(tokenizer, [3 + first, 2, 3 + second])) == "é"


@pytest.mark.parametrize("name", SOURCES)
def test_token_bytes_join_to_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = " the über 🙂 你好"
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert joined.decode().removeprefix(" " if name == "spm" else "") == text


def test_token_bytes_of_special_and_unknown_ids() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10_000) == tokenizer.token_bytes(-1) == b""


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_other_decoders_are_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(UnsupportedModelError, match="decoder"):
        DecoderRules.from_json(decoder)
