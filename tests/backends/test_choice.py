"""Which back end computes, and what is said when it cannot."""

from __future__ import annotations

import sys

import pytest

from support.memory_model import MemoryModel, random_model
from topg import _native
from topg.backends import backend_type, load_backend
from topg.backends.native import NativeBackend
from topg.errors import BackendError, ConfigError


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return random_model("int8")


def test_the_processor_is_for_the_native_back_end(model: MemoryModel) -> None:
    backend = load_backend(model, page_count=1, tokens_per_page=32, threads=1)
    assert isinstance(backend, NativeBackend) and backend.threads == 1 and backend.isa == _native.usable_isas()[-1]
    assert backend_type() is NativeBackend


def test_torch_can_be_chosen_and_has_every_other_device(model: MemoryModel) -> None:
    pytest.importorskip("torch")
    from topg.backends.torch import TorchBackend

    assert isinstance(load_backend(model, "torch", page_count=1, tokens_per_page=32), TorchBackend)
    assert backend_type("auto", "cuda") is backend_type("torch") is TorchBackend


def test_native_computes_on_the_processor_only() -> None:
    with pytest.raises(BackendError, match=r"'cpu', not on 'cuda'; for that, choose execution.backend torch"):
        backend_type("native", "cuda")


def test_native_has_one_kind_of_attention(model: MemoryModel) -> None:
    with pytest.raises(ConfigError, match=r"enable_flash_attn is false.*choose execution.backend torch"):
        backend_type(flash_attention=False)
    with pytest.raises(ConfigError, match="enable_flash_attn"):
        NativeBackend(model, page_count=1, tokens_per_page=32, flash_attention=False)


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_the_instruction_set_can_be_named(model: MemoryModel, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_ISA", isa)
    backend = load_backend(model, page_count=1, tokens_per_page=32)
    assert isinstance(backend, NativeBackend) and backend.isa == isa


def test_an_instruction_set_that_does_not_exist_is_refused(model: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_ISA", "abacus")
    for attempt in (backend_type, lambda: load_backend(model, page_count=1, tokens_per_page=32)):
        with pytest.raises(ConfigError, match="'abacus'; this processor can run scalar"):
            attempt()


def test_without_the_native_module_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("topg.backends.native", "topg._native"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("topg._native")
    monkeypatch.setitem(sys.modules, "topg._native", None)
    with pytest.raises(BackendError, match=r"not built: install topg with pip, or choose execution.backend torch"):
        backend_type()


def test_pages_hold_whole_tiles(model: MemoryModel) -> None:
    with pytest.raises(BackendError, match=r"a page of 40 tokens.*multiples of 32"):
        NativeBackend(model, page_count=1, tokens_per_page=40)
