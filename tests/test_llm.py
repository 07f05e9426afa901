"""`topg.LLM` on a tiny random model, with the real converter, tokenizer and native back end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import VOCAB, llama_config, llama_tensors, write_huggingface
from topg import LLM, SamplingParams
from topg.config import Config, ExecutionConfig, resolve
from topg.errors import BackendError, ConfigError, PromptTooLongError, RequestError
from topg.types import Delta, GenerationResult

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0)
RECOMMENDED = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.9}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config()
    tensors = llama_tensors(config)
    # large enough that every token of the context matters
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 4
    return write_huggingface(
        tmp_path_factory.mktemp("source") / "tiny", config=config, tensors=tensors, generation=RECOMMENDED
    )


@pytest.fixture(scope="module")
def llm(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPG_HOME", str(tmp_path_factory.mktemp("home")))
        with LLM(source, quant="float32", max_context=200, max_batch_size=4) as loaded:
            yield loaded


@pytest.fixture(autouse=True)
def _pages_come_back(llm: LLM) -> Iterator[None]:
    yield
    status = llm.status()
    assert (status.waiting, status.running, status.pages_used) == (0, 0, 0)


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> GenerationResult:
    (result,) = llm.generate(prompt, params)
    return result


def joined(deltas: list[Delta]) -> tuple[str, tuple[int, ...], Any]:
    assert all(delta.finish_reason is None and delta.usage is None for delta in deltas[:-1])
    text = "".join(delta.text for delta in deltas)
    return text, tuple(token for delta in deltas for token in delta.token_ids), deltas[-1].finish_reason


MIXED = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=12),
    SamplingParams(seed=5, temperature=0, repetition_penalty=2.0, max_tokens=10),
    SamplingParams(seed=2, temperature=100.0, top_k=50, max_tokens=5),
    SamplingParams(seed=3, top_p=0.7, logprobs=3, max_tokens=9),
    SamplingParams(seed=6, temperature=0, max_tokens=6, logit_bias={5: 100}),
    SamplingParams(seed=4, frequency_penalty=2.0, presence_penalty=-1.0, max_tokens=11),
]
PROMPTS = ["The quick", "a", "Once upon a time there was a small language model " * 4, "dog", "user", "x y z", "the"]


def test_results_come_in_order_and_alone_equals_together(llm: LLM) -> None:
    together = llm.generate(PROMPTS, MIXED)
    assert together == [one(llm, prompt, params) for prompt, params in zip(PROMPTS, MIXED, strict=True)]
    assert len({result.text for result in together}) > 4


def test_every_token_of_the_prompt_matters(llm: LLM) -> None:
    assert one(llm, "The quick brown fox").token_ids != one(llm, "A quick brown fox").token_ids


def test_small_steps_give_the_same_answers(llm: LLM, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_HOME", str(llm.model.folder.parent.parent))
    config = Config(execution=ExecutionConfig(max_batch_size=3, max_context=200, prefill_chunk=3))
    with LLM(source, quant="float32", config=config) as chunked:
        assert chunked.generate(PROMPTS, MIXED) == llm.generate(PROMPTS, MIXED)


@pytest.mark.parametrize("params", MIXED, ids=range(len(MIXED)))
def test_the_stream_joined_is_the_answer(llm: LLM, params: SamplingParams) -> None:
    result = one(llm, PROMPTS[0], params)
    assert joined(list(llm.stream(PROMPTS[0], params))) == (result.text, result.token_ids, result.finish_reason)


def test_a_prompt_may_stand_alone_or_be_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The quick")
    expected = one(llm, "The quick")
    assert expected.prompt_token_ids == tuple(ids)
    for prompts in (["The quick"], ids, tuple(ids), [ids]):
        assert llm.generate(prompts, GREEDY) == [expected]
    assert llm.generate([ids, "a"], GREEDY) == [expected, one(llm, "a")]
    assert llm.generate([]) == []


def test_usage_and_length(llm: LLM) -> None:
    result = one(llm, "The quick", GREEDY)
    assert result.finish_reason == "length" and result.usage.completion_tokens == 8 == len(result.token_ids)
    assert result.usage.prompt_tokens == len(result.prompt_token_ids)


def test_the_reported_seed_repeats_an_answer(llm: LLM) -> None:
    drawn = [one(llm, "The", SamplingParams(temperature=2.0, max_tokens=10)) for _ in range(3)]
    assert len({result.token_ids for result in drawn}) > 1
    again = one(llm, "The", SamplingParams(temperature=2.0, max_tokens=10, seed=drawn[0].seed))
    assert again == drawn[0]


def test_bans_and_exclusive_tokens(llm: LLM) -> None:
    first = one(llm, "The quick").token_ids[0]
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=20, logit_bias={first: -100}, ignore_eos=True)
        assert first not in one(llm, "The quick", params).token_ids
        params = SamplingParams(temperature=temperature, max_tokens=5, logit_bias={9: 100})
        assert one(llm, "The quick", params).token_ids == (9,) * 5


def test_end_tokens_end_and_min_tokens_delays_them(llm: LLM) -> None:
    assert one(llm, "a", SamplingParams(logit_bias={2: 100})).finish_reason == "stop"
    result = one(llm, "a", SamplingParams(temperature=0, logit_bias={2: 99.0}, min_tokens=3))
    assert len(result.token_ids) == 4 and result.token_ids[-1] == 2 and 2 not in result.token_ids[:-1]


def test_a_stop_string_cuts_and_frees(llm: LLM) -> None:
    whole = one(llm, "The quick", SamplingParams(temperature=0, max_tokens=30))
    stop = whole.text[4:6]
    cut = one(llm, "The quick", SamplingParams(temperature=0, max_tokens=30, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    result = one(llm, "The quick", SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    assert result.logprobs is not None
    assert [position.chosen.token_id for position in result.logprobs] == list(result.token_ids)
    for position in result.logprobs:
        assert position.top[0] == position.chosen and position.top[1].logprob <= position.chosen.logprob < 0


def test_a_constraint_that_leaves_nothing_is_refused_before_anything_runs(llm: LLM) -> None:
    impossible = SamplingParams(logit_bias={2: 100}, min_tokens=1)
    with pytest.raises(RequestError, match=r"prompts\[0\]: .*min_tokens") as caught:
        llm.generate(["The quick"] * 2, [impossible, GREEDY])
    assert caught.value.param == "logit_bias"


def test_closing_a_stream_early(llm: LLM) -> None:
    with llm.stream("The quick", SamplingParams(max_tokens=100, ignore_eos=True)) as stream:
        next(stream)
        assert llm.status().running == 1
    assert llm.status().pages_used == 0
    assert one(llm, "The quick") == one(llm, "The quick")


def test_threads_share_the_model(llm: LLM) -> None:
    results: dict[int, list[GenerationResult]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: llm.generate(PROMPTS[i], MIXED[i])})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {i: llm.generate(PROMPTS[i], MIXED[i]) for i in range(4)}


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    result = llm.chat(messages, GREEDY)
    assert result == one(llm, llm.tokenizer.encode_chat(messages))
    assert joined(list(llm.stream(messages, GREEDY)))[0] == result.text


def test_without_params_the_recommendation_counts(llm: LLM) -> None:
    assert llm.default_params == SamplingParams(temperature=0.5, top_k=20, top_p=0.9)
    (result,) = llm.generate([[5] * 192])
    assert result == one(llm, [5] * 192, replace(llm.default_params, seed=result.seed))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["fine", ""], r"prompts\[1\]: the prompt has no tokens"),
        ([[]], r"prompts\[0\]"),
        ([[1, VOCAB]], r"prompts\[0\]: .*token id 320"),
        (["a", 5], r"prompts\[1\]"),
        (["a", None], r"prompts\[1\]"),
        ([True], "token id True"),
        ("", "no tokens"),
        (None, "NoneType"),
        (7, "int"),
        ({"a": 1}, "dict"),
    ],
    ids=repr,
)
def test_a_bad_prompt_stops_everything_before_it_runs(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, "greedy", 5, [GREEDY, 5]], ids=list("abcde"))
def test_params_are_one_or_one_for_each(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.param == "sampling_params"


def test_what_does_not_fit_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="context of 200"):
        llm.generate("the " * 400, GREEDY)
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]"):
        llm.generate(["a", [5] * 2], SamplingParams(max_tokens=199))
    assert len(one(llm, [5] * 195, SamplingParams(temperature=0, ignore_eos=True)).token_ids) == 5


def test_max_context_beyond_the_model_is_refused(source: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        LLM(llm.model.folder, max_context=513)
    with pytest.raises(ConfigError, match="max_context"):
        LLM(llm.model.folder, max_context=0)
    with pytest.raises(ConfigError, match="at most 512"):
        LLM(llm.model.folder, config=Config(execution=ExecutionConfig(max_context=600)))
    monkeypatch.setenv("TOPG_EXECUTION_MAX_CONTEXT", "513")
    with pytest.raises(ConfigError, match="TOPG_EXECUTION_MAX_CONTEXT"):
        LLM(llm.model.folder)


def test_only_the_default_context_is_cut(llm: LLM) -> None:
    for config in (None, Config(), resolve()):
        with LLM(llm.model.folder, config=config, max_batch_size=1) as loaded:
            assert loaded.max_context == 512


def test_a_configuration_that_is_given_leaves_the_environment_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_CONFIG", "/nonexistent/topg.yaml")
    monkeypatch.setenv("TOPG_EXECUTION_MAX_BATCH_SIZE", "nonsense")
    for config in (Config(), resolve({"execution.max_context": 100})):
        with LLM(llm.model.folder, config=config, max_context=64) as loaded:
            assert loaded.max_context == 64


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, 1025, 10**400])
def test_threads_are_checked(llm: LLM, threads: Any) -> None:
    with pytest.raises(ConfigError, match=r"threads is .* from 1 to 1024$"):
        LLM(llm.model.folder, threads=threads)


def test_it_answers_where_torch_is_not_installed(llm: LLM) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from topg import LLM, SamplingParams\n"
        f"with LLM({str(llm.model.folder)!r}, max_context=64) as llm:\n"
        "    print(*llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].token_ids)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True).stdout
    assert tuple(map(int, said.split())) == one(llm, [1, 2, 3], replace(GREEDY, max_tokens=4)).token_ids


def test_the_back_end_can_be_chosen(llm: LLM) -> None:
    pytest.importorskip("torch")
    config = Config(execution=ExecutionConfig(backend="torch", max_context=64))
    with LLM(llm.model.folder, config=config) as oracle:
        assert one(oracle, [1, 2, 3]).token_ids == one(llm, [1, 2, 3]).token_ids


def test_what_a_back_end_cannot_do_is_said_before_a_conversion(tmp_path: Path) -> None:
    config = Config(execution=ExecutionConfig(enable_flash_attn=False))
    with pytest.raises(ConfigError, match="enable_flash_attn is false"):
        LLM(tmp_path / "no model", config=config)
    with pytest.raises(BackendError, match=r"choose execution\.backend torch"):
        LLM(tmp_path / "no model", device="cuda", config=Config(execution=ExecutionConfig(backend="native")))


def test_a_closed_model_refuses_calls(llm: LLM) -> None:
    loaded = LLM(llm.model.folder, max_context=64)
    loaded.close()
    with pytest.raises(RequestError, match="closed"):
        loaded.generate("a")
    with pytest.raises(RequestError, match="closed"):
        loaded.generate([])
    with pytest.raises(RequestError, match="closed"):
        loaded.status()
    with pytest.raises(RequestError, match="closed"), loaded:
        pass


def test_a_stream_says_what_is_wrong_with_its_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty list"):
        llm.stream([])
    for prompts in ([[]], ["a"], [[1]]):
        with pytest.raises(RequestError, match="generate takes a list of prompts"):
            llm.stream(prompts)
