"""How the next token of one request is chosen, and when the request ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import Any, NoReturn, cast

from topg.errors import RequestError
from topg.wording import shown

GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_SEED = 2**64 - 1
MAX_STOPS = 64
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
DEFAULT_MAX_TOKENS = 256
DEFAULT_CHAT_TOKENS = 1024

_NUMBERS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, MAX_TEMPERATURE),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
        "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    }
)
_COUNTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "top_k": (-1, MAX_TOP_K),
        "seed": (0, MAX_SEED),
        "min_tokens": (0, MAX_COUNT),
        "max_tokens": (1, MAX_COUNT),
        "logprobs": (0, MAX_LOGPROBS),
    }
)
_OPTIONAL = ("seed", "max_tokens", "logprobs")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, checked when they are made; RequestError names the field, the value and the range.

    temperature         0 to 100; the logits are divided by it.  Below 0.00001 it means greedy: always the best token
    top_k               keep the k best tokens; 0 or -1, and any k of at least the vocabulary, keep all
    top_p               0 to 1; keep the fewest best tokens that hold this much probability, at least the best one
    min_p               0 to 1; keep tokens with at least this share of the best token's probability
    repetition_penalty  0.01 to 100; for every token of prompt and output, once however often it occurs: a positive
                        logit is divided by it, a negative one multiplied
    presence_penalty    -2 to 2; subtracted once from every token that was generated (prompt tokens do not count)
    frequency_penalty   -2 to 2; subtracted as often as the token was generated
    logit_bias          {token id: -100 to 100}, added to the logits.  Exactly -100 bans the token; exactly 100 makes
                        it exclusive: nothing but tokens with 100 can be drawn
    seed                0 to 2**64 - 1; same seed, same text.  None: drawn by the system, and told in the result
    stop                text that ends the output (a string or up to 64 of up to 256 characters); the earliest
                        occurrence in the text counts, whatever the order of the list
    stop_token_ids      token ids that end the output, besides the model's own
    include_stop_str_in_output  leave the stop text (or the text of the stop token) at the end of the output
    min_tokens          tokens before which nothing ends the output: the model's end tokens and `stop_token_ids` cannot
                        be drawn, and stop strings are not looked for
    max_tokens          most tokens to generate, at least 1.  None: 256, in a chat 1024, or fewer where the context ends
                        before
    ignore_eos          do not end at the model's own end tokens
    logprobs            report the chosen token's log-probability and this many best alternatives (0 to 20)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), low, high))
        for name, (least, most) in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _count(name, value, least, most))
        _check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_flag("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"allowed: at most max_tokens, which is {self.max_tokens}")
        object.__setattr__(self, "logit_bias", MappingProxyType(_biases(self.logit_bias)))
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop)

    @property
    def exclusive_tokens(self) -> tuple[int, ...]:
        """Ids with a bias of exactly 100; when there are any, nothing else can be drawn."""
        return tuple(token for token, bias in self.logit_bias.items() if bias == MAX_BIAS)

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Ids with a bias of exactly -100."""
        return tuple(token for token, bias in self.logit_bias.items() if bias == -MAX_BIAS)

    @property
    def added_biases(self) -> dict[int, float]:
        """The biases that are added to logits: all but bans and exclusive tokens."""
        return {token: bias for token, bias in self.logit_bias.items() if abs(bias) < MAX_BIAS}

    def check_tokens(self, vocab: int) -> None:
        """Raise RequestError when a token id of a field is outside a vocabulary of `vocab` tokens."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in tokens if token >= vocab]
            if outside:
                _refuse(name, outside[0], f"allowed: token ids 0 to {vocab - 1} of this model")

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data; `SamplingParams(**data)` gives equal ones, once bias keys are integers."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        lists = {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        return values | lists | {"logit_bias": dict(self.logit_bias)}

    def __reduce__(self) -> tuple[Callable[..., SamplingParams], tuple[dict[str, Any]]]:
        """For `copy` and `pickle`, which do not know read-only mappings."""
        return _rebuild, (self.to_json(),)


def whole_number(value: object) -> int | None:
    """The int that a value of any integer type stands for, numpy's included; None for others and for booleans."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return index(value)
    except TypeError:  # arrays and numpy's booleans have the method and refuse
        return None


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise RequestError(f"{name} is {shown(value)}; {allowed}", param=name.partition("[")[0])


def _number(name: str, value: object, low: float, high: float) -> float:
    """A real number of Python or numpy in a range, which NaN and infinity are never in."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= cast(float, value) <= high:
        _refuse(name, value, f"allowed: a number from {low:g} to {high:g}")
    return float(value)


def _count(name: str, value: object, low: int, high: int) -> int:
    number = whole_number(value)
    if number is None or not low <= number <= high:
        _refuse(name, value, f"allowed: a whole number from {low} to {high}")
    return number


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "allowed: True or False")


def _check_length(name: str, items: Sequence[object] | Mapping[Any, object], most: int) -> None:
    if len(items) > most:
        raise RequestError(f"{name} has {len(items)} entries; allowed: at most {most}", param=name)


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        _refuse("logit_bias", given, "allowed: a mapping of token ids to numbers")
    _check_length("logit_bias", given, MAX_BIASES)
    return {
        _count("logit_bias", token, 0, MAX_COUNT): _number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
        for token, bias in given.items()
    }


def _stops(given: object) -> tuple[str, ...]:
    items = (given,) if isinstance(given, str) else _items("stop", given, "a string or a list of strings")
    _check_length("stop", items, MAX_STOPS)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_LENGTH:
            _refuse("stop", item, f"allowed: strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(str(item) for item in items)


def _stop_tokens(given: object) -> tuple[int, ...]:
    items = _items("stop_token_ids", given, "a list of token ids")
    _check_length("stop_token_ids", items, MAX_STOP_TOKENS)
    return tuple(dict.fromkeys(_count("stop_token_ids", item, 0, MAX_COUNT) for item in items))


def _items(name: str, given: object, allowed: str) -> tuple[Any, ...]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable) or not hasattr(given, "__len__"):
        _refuse(name, given, f"allowed: {allowed}")
    return tuple(given)
