"""Stage 1: check every field, render the chat template, tokenise, and make a `Request` or refuse."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topg.errors import PromptTooLongError, RequestError
from topg.sampling_params import DEFAULT_CHAT_TOKENS, DEFAULT_MAX_TOKENS, SamplingParams, whole_number
from topg.tokenizer.messages import check_messages, text_size
from topg.tokenizer.tokenizer import Tokenizer
from topg.types import Request
from topg.wording import shown

MAX_CHARACTERS_PER_TOKEN = 512
SEED_BITS = 53  # a drawn seed survives JSON readers that keep numbers as doubles

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class IntakeLimits:
    """What a request may ask of this model: tokens of prompt and output together, and the rows of its vocabulary."""

    max_context: int
    vocab: int


class Intake:
    """Turns what a caller wrote into requests.  Keeps no state between calls; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int], limits: IntakeLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._end_tokens = frozenset(end_tokens)

    def from_prompt(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """A request for a text or for token ids, which are taken as they are, without a BOS token added.

        Raises RequestError naming the field at fault.
        """
        if isinstance(prompt, str):
            return self._request(self._encode(prompt), params, DEFAULT_MAX_TOKENS)
        return self._request(self._checked_ids(prompt), params, DEFAULT_MAX_TOKENS)

    def from_messages(self, messages: Messages, params: SamplingParams) -> Request:
        """A request for a chat: the model's template is rendered over the messages."""
        checked = check_messages(messages)
        self._check_size(text_size(checked), "messages")
        return self._request(self.tokenizer.encode_chat(checked), params, DEFAULT_CHAT_TOKENS)

    def _encode(self, text: str) -> list[int]:
        self._check_size(len(text), "prompt")
        return self.tokenizer.encode(text)

    def _check_size(self, characters: int, param: str) -> None:
        """Refuse what is certainly too long before time is spent on tokenising it."""
        most = self.limits.max_context * MAX_CHARACTERS_PER_TOKEN
        if characters > most:
            raise PromptTooLongError(
                f"{param}: {characters} characters are too many; a context of {self.limits.max_context} tokens takes "
                f"at most {most}", param=param,
            )  # fmt: skip

    def _checked_ids(self, ids: object) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(ids).__name__}", param="prompt")
        if not ids:
            raise RequestError("the prompt is an empty list, so it has no tokens; give at least one", param="prompt")
        return [self._checked_id(token) for token in ids]

    def _checked_id(self, given: object) -> int:
        if isinstance(given, (str, list, tuple)):
            raise RequestError(
                f"one prompt is a text or a list of token ids, and this list holds {shown(given)}; "
                "generate takes a list of prompts", param="prompt",
            )  # fmt: skip
        token = whole_number(given)
        if token is None or not 0 <= token < self.limits.vocab:
            allowed = f"allowed: whole numbers from 0 to {self.limits.vocab - 1}"
            raise RequestError(f"the prompt holds the token id {shown(given)}; {allowed}", param="prompt")
        return token

    def _request(self, tokens: Sequence[int], params: SamplingParams, default_tokens: int) -> Request:
        if not tokens:
            raise RequestError(
                "the prompt has no tokens, and this model adds none in front; give at least one character or token id",
                param="prompt",
            )
        params.check_tokens(self.limits.vocab)
        end_tokens = (frozenset() if params.ignore_eos else self._end_tokens).union(params.stop_token_ids)
        self._check_possible(params, end_tokens)
        return Request(
            prompt_tokens=tuple(tokens),
            params=params,
            max_tokens=self._max_tokens(len(tokens), params, default_tokens),
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            end_tokens=end_tokens,
        )

    def _check_possible(self, params: SamplingParams, end_tokens: frozenset[int]) -> None:
        """Refuse constraints that leave no token to draw at the first step."""
        kept = set(params.exclusive_tokens) or set(range(self.limits.vocab)).difference(params.banned_tokens)
        if params.min_tokens > 0:
            kept -= end_tokens
        if not kept:
            raise RequestError(
                "logit_bias leaves no token to draw"
                + (" that does not end the text, and min_tokens is not 0" if params.min_tokens > 0 else "")
                + "; allow at least one", param="logit_bias",
            )  # fmt: skip

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams, default: int) -> int:
        """Tokens to generate at most: what was asked for if it fits, or the default cut to what fits."""
        context = self.limits.max_context
        room = context - prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in a context of {context}; "
                "shorten the prompt or raise max_context", param="prompt",
            )  # fmt: skip
        wanted = min(default, room) if params.max_tokens is None else params.max_tokens
        for name, value in (("max_tokens", wanted), ("min_tokens", params.min_tokens)):
            if value > room:
                raise PromptTooLongError(
                    f"{prompt_tokens} prompt tokens and {name} of {value} do not fit the context of {context}; "
                    f"allowed for this prompt: at most {room}", param=name,
                )  # fmt: skip
        return max(wanted, params.min_tokens)
