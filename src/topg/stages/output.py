"""Stage 3: tokens to text, stop strings, log-probabilities, and the pieces that go to the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topg.sampling import Sampled
from topg.stages.compute import StepOutput, TokenEvent
from topg.stages.queues import BoundedQueue
from topg.tokenizer.stop_strings import StopMatcher
from topg.tokenizer.tokenizer import Tokenizer
from topg.types import Delta, FinishReason, GenerationResult, PositionLogprobs, Request, TokenLogprob, Usage

UNREAD_DELTAS = 64  # of one answer, before they are joined into one


class AnswerText:
    """The text of one answer as its tokens arrive.

    Stop strings are looked for from the token after `min_tokens` on; the text before it never takes part in a match.
    The model's end tokens are never text; those of `stop_token_ids` are only if the stop is to be included.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(params.stops, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        shown_ends = params.stop_token_ids if params.include_stop_str_in_output else ()
        self._silent = request.end_tokens.difference(shown_ends)
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """Text that can be sent now that `token` is known."""
        self._tokens += 1
        text = "" if token in self._silent else self._detokenizer.push(token)
        return text if self._tokens <= self._min_tokens else self._stops.push(text)[0]

    def flush(self) -> str:
        """What was held back, once the last token is known."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush())[0] + self._stops.flush()


class Answer:
    """One request's answer under way: events in, deltas out."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, request)
        self._prompt_tokens = len(request.prompt_tokens)
        self._with_logprobs = request.params.logprobs is not None
        self._completion_tokens = 0

    def push(self, event: TokenEvent) -> Delta:
        """The delta of one event; it may be empty, and the last one has a finish reason."""
        text = "" if event.sampled is None else self._push_token(event.sampled)
        reason: FinishReason | None = "stop" if self._text.stopped else event.finish_reason
        if reason is not None:
            text += self._text.flush()
            reason = "stop" if self._text.stopped and event.error is None else reason
        return Delta(
            text=text,
            token_ids=() if event.sampled is None else (event.sampled.token,),
            logprobs=self._logprobs(event.sampled) if self._with_logprobs else None,
            finish_reason=reason,
            usage=None if reason is None else Usage(self._prompt_tokens, self._completion_tokens),
            error=event.error,
        )

    def _push_token(self, sampled: Sampled) -> str:
        self._completion_tokens += 1
        return self._text.push(sampled.token)

    def _logprobs(self, sampled: Sampled | None) -> tuple[PositionLogprobs, ...]:
        if sampled is None or sampled.logprob is None:
            return ()
        top = tuple(self._token_logprob(token, logprob) for token, logprob in sampled.top)
        return (PositionLogprobs(self._token_logprob(sampled.token, sampled.logprob), top),)

    def _token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob)


class Output:
    """All answers under way, and the deltas that their readers have not taken yet.

    A slow reader holds up nobody: what it has not taken is joined into one delta, no larger than its answer.
    """

    def __init__(self, tokenizer: Tokenizer, inbox: BoundedQueue[StepOutput]) -> None:
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._answers: dict[int, Answer] = {}
        self._unread: dict[int, list[Delta]] = {}

    def open(self, key: int, request: Request) -> None:
        """Expect events of this key, until it finishes or is closed."""
        self._answers[key] = Answer(self._tokenizer, request)
        self._unread[key] = []

    def close(self, key: int) -> None:
        """Forget a key and what was not read of it."""
        self._answers.pop(key, None)
        self._unread.pop(key, None)

    def take(self, key: int) -> Delta | None:
        """Everything of a key since the last call, as one delta; None when there is nothing new.

        A key that is not open any more was cancelled: its reader gets an empty delta that says "abort".
        """
        if key not in self._unread:
            return Delta("", (), finish_reason="abort")
        unread, self._unread[key] = self._unread[key], []
        return join(unread) if unread else None

    def process(self) -> list[int]:
        """Turn all queued step outputs into deltas; returns the keys that a stop string has ended."""
        ended = []
        while (output := self._inbox.take()) is not None:
            ended += [event.key for event in output.events if self._deliver(event)]
        return ended

    def _deliver(self, event: TokenEvent) -> bool:
        """Hand an event to its answer; whether that ended it before compute knew."""
        answer = self._answers.get(event.key)
        if answer is None:
            return False
        delta = answer.push(event)
        self._keep(event.key, delta)
        if delta.finish_reason is None:
            return False
        del self._answers[event.key]
        return event.finish_reason is None

    def _keep(self, key: int, delta: Delta) -> None:
        unread = self._unread[key]
        unread.append(delta)
        if len(unread) == UNREAD_DELTAS:
            unread[:] = [join(unread)]


def join(deltas: Sequence[Delta]) -> Delta:
    """One delta with the contents of at least one, in order."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=None if last.logprobs is None else _all_logprobs(deltas),
        finish_reason=last.finish_reason,
        usage=last.usage,
        error=last.error,
    )


def result_of(request: Request, deltas: Sequence[Delta]) -> GenerationResult:
    """The answer that is not streamed: its deltas up to the last one, joined."""
    whole = join(deltas)
    assert whole.finish_reason is not None and whole.usage is not None
    return GenerationResult(
        text=whole.text,
        token_ids=whole.token_ids,
        prompt_token_ids=request.prompt_tokens,
        finish_reason=whole.finish_reason,
        usage=whole.usage,
        seed=request.seed,
        logprobs=whole.logprobs,
        error=whole.error,
    )


def _all_logprobs(deltas: Iterable[Delta]) -> tuple[PositionLogprobs, ...]:
    return tuple(position for delta in deltas for position in delta.logprobs or ())
