"""A byte-level tokenizer whose ids can be read off: `<end>` 0, `<user>` 1, the 256 bytes, then extra tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from topg.tokenizer.decoding import byte_level_alphabet
from topg.tokenizer.special import SpecialTokens
from topg.tokenizer.tokenizer import Tokenizer

END, USER = 0, 1
FIRST_BYTE = 2
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"


def byte_tokenizer(extra: Sequence[bytes] = (), *, bos: int | None = None) -> Tokenizer:
    """`extra` are tokens of several bytes, with ids from 258 on; no text is encoded into them."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    tokens = ["<end>", "<user>", *(letters[byte] for byte in range(256))]
    tokens += ["".join(letters[byte] for byte in token) for token in extra]
    made = FastTokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<user>", special=True)])
    tokens_of_model = SpecialTokens(
        bos=bos, add_bos=bos is not None, eos=(END,), pad=None, unk=None, chat_markers=(END, USER)
    )
    return Tokenizer(made.to_str(), tokens_of_model, TEMPLATE)


def ids_of(text: str | bytes) -> list[int]:
    """One token per byte."""
    raw = text.encode() if isinstance(text, str) else text
    return [FIRST_BYTE + byte for byte in raw]
