"""Values that travel between the stages and to the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topg.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one request.  End tokens and tokens cut off by a stop string count: they were computed."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its natural-log probability after penalties and biases, before temperature and truncation.

    `bytes` are the raw bytes the token stands for; `text` is them decoded with replacement characters.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class PositionLogprobs:
    """The chosen token of one position and the best alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Request:
    """What intake hands to compute: checked, tokenised, with every open choice made.

    end_tokens  ids that end the output: the model's own, unless they are to be ignored, and `params.stop_token_ids`
    """

    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    end_tokens: frozenset[int]


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer.  The last one has a finish_reason and usage, and an error if that ended it.

    Joined, the pieces are exactly the answer that is not streamed: texts, ids and log-probabilities.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True)
class GenerationResult:
    """One finished answer.

    token_ids      every computed token: also the end token, and tokens whose text a stop string cut off
    finish_reason  "stop" (an end token or stop string), "length" (max_tokens), "abort", or "error" (see `error`)
    logprobs       one entry per token id, or None when they were not asked for
    seed           the seed that repeats this answer
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    logprobs: tuple[PositionLogprobs, ...] | None = None
    error: str | None = None
