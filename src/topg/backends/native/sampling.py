"""Drawing inside the engine: what `topg.sampling` says in numpy, on the engine's threads and without copying logits."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np

from topg import _native
from topg.backends.native.step_arrays import StepArrays
from topg.errors import ComputeError
from topg.sampling import Sampled, SamplerState
from topg.sampling.sampler import NO_TOKEN_LEFT, UNUSABLE_LOGITS

_ERRORS = {"unusable": UNUSABLE_LOGITS, "no token": NO_TOKEN_LEFT}
_NO_LOGPROBS = -1


class NativeStates:
    """The native counterparts of sampler states: made when a state is first seen, forgotten together with it."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[SamplerState, _native.SamplerState] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def of(self, state: SamplerState) -> _native.SamplerState:
        """The counterpart, with all tokens recorded that the state has."""
        native = self._made.get(state)
        if native is None:
            native = self._made[state] = native_state(state)
        for token in state.output[native.generated :]:
            native.record(token)
        return native


class EngineSampler:
    """Runs steps of a finished engine and draws from their logits in the same native call.

    native_seconds  time spent in native calls so far
    """

    def __init__(self, engine: _native.Engine) -> None:
        self.native_seconds = 0.0
        self._sampler = _native.Sampler(engine)
        self._states = NativeStates()

    def run(self, step: StepArrays, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        """One outcome for each row of the step whose logits are wanted; states[i] belongs to row i."""
        native_states = [self._states.of(state) for state in states]
        begin = perf_counter()
        results = self._sampler.run(*step, native_states)
        self.native_seconds += perf_counter() - begin
        return [outcome_of(result) for result in results]


def native_state(state: SamplerState) -> _native.SamplerState:
    """A native state with the settings and prompt of `state`; its output is still to be recorded."""
    params = state.params
    return _native.SamplerState(
        vocab=state.vocab,
        prompt=np.array(state.prompt, np.int32),
        seed=state.seed,
        greedy=params.greedy,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        biases=list(params.added_biases.items()),
        banned=list(params.banned_tokens),
        exclusive=list(params.exclusive_tokens),
        end_tokens=state.end_tokens,
        min_tokens=params.min_tokens,
        logprobs=_NO_LOGPROBS if params.logprobs is None else params.logprobs,
    )


def outcome_of(result: _native.SampleResult) -> Sampled | ComputeError:
    """What `topg.sampling.sample` would return for a native result."""
    if isinstance(result, int):
        return Sampled(result)
    if isinstance(result, str):
        return ComputeError(_ERRORS[result])
    token, logprob, top = result
    return Sampled(token, logprob, tuple(top))
