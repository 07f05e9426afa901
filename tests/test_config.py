"""The configuration: which source wins, and every way in which a source can be wrong."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from topg.config import SETTINGS, Config, ExecutionConfig, MemoryConfig, resolve
from topg.errors import ConfigError

SWITCH = "execution.enable_flash_attn"
SWITCH_VARIABLE = "TOPG_EXECUTION_ENABLE_FLASH_ATTN"
TUNING = Path(__file__).parents[1] / "config" / "tuning.yaml"


def config_file(folder: Path, text: str) -> Path:
    file = folder / "tuning.yaml"
    file.write_bytes(text.encode())
    return file


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(file=file)
    return str(error.value)


def test_without_sources_everything_is_default() -> None:
    resolved = resolve()
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.is_default("memory.page_size")


def test_the_example_file_holds_every_key_at_its_default() -> None:
    resolved = resolve(file=TUNING)
    assert resolved.config == Config()
    assert "default" not in resolved.origins.values()


@pytest.mark.parametrize("in_file", [None, True, False])
@pytest.mark.parametrize("in_environment", [None, True, False])
@pytest.mark.parametrize("in_flag", [None, True, False])
def test_flag_over_environment_over_file_over_default(
    tmp_path: Path, in_file: bool | None, in_environment: bool | None, in_flag: bool | None
) -> None:
    text = f"execution: {{enable_flash_attn: {str(in_file).lower()}}}" if in_file is not None else ""
    file = config_file(tmp_path, text)
    environ = {SWITCH_VARIABLE: str(in_environment).lower()} if in_environment is not None else {}
    flags = {SWITCH: in_flag} if in_flag is not None else {}
    given = [value for value in (in_flag, in_environment, in_file) if value is not None]

    resolved = resolve(flags, environ, file)

    assert resolved.config.execution.enable_flash_attn is (given[0] if given else True)


def test_the_origin_of_a_value_is_told(tmp_path: Path) -> None:
    file = config_file(tmp_path, "execution:\n  max_batch_size: 2\n  max_context: 100\nmemory: {page_size: 8MB}\n")
    resolved = resolve({"execution.max_batch_size": 3}, {"TOPG_EXECUTION_MAX_CONTEXT": "200"}, file)
    assert resolved.config.execution.max_batch_size == 3
    assert resolved.config.execution.max_context == 200
    assert resolved.config.memory.page_size == 8_000_000
    assert resolved.origins == dict.fromkeys(SETTINGS, "default") | {
        "execution.max_batch_size": "--max-batch-size",
        "execution.max_context": "TOPG_EXECUTION_MAX_CONTEXT",
        "memory.page_size": f"{file}, line 4",
    }


def test_topg_config_names_the_file_and_an_argument_beats_it(tmp_path: Path) -> None:
    named = config_file(tmp_path, "execution: {max_batch_size: 2}")
    other = tmp_path / "other.yaml"
    other.write_text("execution: {max_batch_size: 3}")
    environ = {"TOPG_CONFIG": str(named)}
    assert resolve(environ=environ).config.execution.max_batch_size == 2
    assert resolve(environ=environ, file=other).config.execution.max_batch_size == 3


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().config.execution.max_batch_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (ExecutionConfig, {"max_batch_size": 0}, "execution.max_batch_size: 0 is not allowed"),
        (ExecutionConfig, {"max_batch_size": True}, "execution.max_batch_size: true is not allowed"),
        (ExecutionConfig, {"enable_flash_attn": 1}, "execution.enable_flash_attn: 1 is not allowed"),
        (ExecutionConfig, {"kv_cache_dtype": "int4"}, "auto or bfloat16 or float32 or int8"),
        (MemoryConfig, {"page_size": "4MB"}, "memory.page_size: the text '4MB' is not allowed"),
        (MemoryConfig, {"preallocate": 80}, "memory.preallocate: 80 is not allowed"),
    ],
)
def test_a_section_made_by_hand_is_checked(section: type, values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        section(**values)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_batch_size": 1024}, "execution.max_batch_size is 1024 and execution.prefill_chunk is 512"),
        ({"prefill_chunk": 8}, "execution.max_batch_size is 16 and execution.prefill_chunk is 8"),
    ],
)
def test_a_batch_must_fit_a_step(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ExecutionConfig(**given)
    with pytest.raises(ConfigError, match=said):
        resolve({f"execution.{name}": value for name, value in given.items()})
    assert ExecutionConfig(max_batch_size=8, prefill_chunk=8).max_batch_size == 8


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "execution:\n", "execution: {}\nmemory:\n", "~\n", "\ufeff"]
)
def test_a_file_or_section_without_keys_sets_nothing(tmp_path: Path, text: str) -> None:
    assert resolve(file=config_file(tmp_path, text)).config == Config()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("true", "true is not allowed"),
        ("'16'", "the text '16' is not allowed"),
        ("1_000", "the text '1_000'"),
        ("+3", "the text '+3'"),
        ("-0", "the text '-0'"),
        ("010", "the text '010'"),
        ("0x10", "the text '0x10'"),
        ("16.0", "the text '16.0'"),
        ("1:30", "the text '1:30'"),
        ("", "an empty value"),
        ("~", "an empty value"),
        ("0", "0 is not allowed"),
        ("-1", "-1 is not allowed"),
        ("4097", "4097 is not allowed"),
        ("9" * 5000, "is not allowed"),
        ("[16]", "a list is not allowed"),
        ("{a: 1}", "a mapping is not allowed"),
        ("!!int abc", "tag"),
        ("!!python/object/apply:os.getcwd []", "a list is not allowed"),
        ("!!python/name:os.getcwd ''", "tag"),
    ],
)
def test_what_is_no_whole_number(tmp_path: Path, value: str, said: str) -> None:
    file = config_file(tmp_path, f"# first\nexecution:\n  max_batch_size: {value}\n")
    message = refusal(file)
    assert f"execution.max_batch_size ({file}, line 3)" in message
    assert said in message


@pytest.mark.parametrize("value", ["'false'", '"true"', "no", "yes", "off", "on", "0", "1", "", "n", "[true]", "fAlse"])
def test_what_is_no_switch(tmp_path: Path, value: str) -> None:
    file = config_file(tmp_path, f"execution:\n  enable_flash_attn: {value}\n")
    assert f"{SWITCH} ({file}, line 2)" in refusal(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory.page_size", "4096"), ("memory.page_size", "4"), ("memory.page_size", "0B"),
        ("memory.page_size", "true"), ("memory.page_size", "big"), ("memory.page_size", ""),
        ("memory.preallocate", "0.8"), ("memory.preallocate", "80"), ("memory.preallocate", "0%"),
        ("memory.preallocate", "101%"), ("execution.kv_cache_dtype", "int4"), ("execution.kv_cache_dtype", "16"),
        ("execution.backend", "cuda"),
    ],
)  # fmt: skip
def test_other_wrong_values(tmp_path: Path, key: str, value: str) -> None:
    section, name = key.split(".")
    assert f"{key} (" in refusal(config_file(tmp_path, f"{section}:\n  {name}: {value}\n"))


@pytest.mark.parametrize("text", ["{page_size: 8MB}", "{page_size: '8MB'}", '{page_size: "8 MB"}'])
def test_a_size_may_be_quoted(tmp_path: Path, text: str) -> None:
    assert resolve(file=config_file(tmp_path, f"memory: {text}")).config.memory.page_size == 8_000_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("execution:\n  max_batch: 3\n", "line 2: 'max_batch' is not a key of 'execution'"),
        ("speed: {}\n", "line 1: 'speed' is not a section"),
        ("max_batch_size: 3\n", "line 1: 'max_batch_size' is not a section"),
        ("execution:\n  max_context: 1\n  max_context: 2\n", "3: 'max_context' stands here again, first in line 2"),
        ("memory: {}\nexecution: {}\nmemory: {}\n", "line 3: 'memory' stands here again, first in line 1"),
        ("a: &x {max_context: 1}\n", "'a' is not a section"),
        ("execution:\n  <<: {max_context: 1}\n", "'<<' is not a key"),
        ("execution:\n\tmax_context: 1\n", "line 2 is not YAML"),
        ("- execution\n", "line 1: expected keys"),
        ("execution\n", "line 1: expected keys"),
        ("execution: 3\n", "line 1: expected keys"),
        ("execution: [a]\n", "line 1: expected keys"),
        ("execution: {\n", "is not YAML"),
        ("? [a]\n: 1\n", "is not a section"),
        ("execution: {}\n---\nmemory: {}\n", "is not YAML"),
        ("[" * 3_000, "nested too deeply"),
        ("\x00", "is not YAML"),
        (" " * 70_000, "larger than"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    file = config_file(tmp_path, text)
    message = refusal(file)
    assert str(file) in message
    assert said in message


def test_a_tab_is_named(tmp_path: Path) -> None:
    assert "indent with spaces, not tabs" in refusal(config_file(tmp_path, "execution:\n\tmax_context: 1\n"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.yaml")
    os.mkfifo(tmp_path / "pipe")
    assert "is a directory, pipe or device" in refusal(tmp_path / "pipe")
    assert "is a directory, pipe or device" in refusal(Path(os.devnull))
    assert "directory" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (SWITCH_VARIABLE, ""), (SWITCH_VARIABLE, "no"), (SWITCH_VARIABLE, "0"),
        ("TOPG_EXECUTION_MAX_BATCH_SIZE", "1_0"), ("TOPG_EXECUTION_MAX_BATCH_SIZE", "0"),
        ("TOPG_EXECUTION_MAX_BATCH_SIZE", " 4"), ("TOPG_EXECUTION_MAX_BATCH_SIZE", "+4"),
        ("TOPG_EXECUTION_MAX_BATCH_SIZE", "\u0664"), ("TOPG_MEMORY_PAGE_SIZE", "4"), ("TOPG_MEMORY_PREALLOCATE", "2"),
        ("TOPG_EXECUTION_MAX_BATCH", "4"), ("TOPG_CONFIG", ""),
    ],
)  # fmt: skip
def test_wrong_variables(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        resolve(environ={variable: value})


@pytest.mark.parametrize("variable", ["TOPG_EXECUTON_MAX_CONTEXT", "TOPG_MAX_CONTEXT", "TOPG_EXECUTION_MAX_CONTEX"])
def test_a_misspelt_variable_is_refused_with_the_nearest(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} is not.*did you mean 'TOPG_EXECUTION_MAX_CONTEXT'\?"):
        resolve(environ={variable: "4"})


def test_other_variables_are_left_alone() -> None:
    environ = {"TOPG_HOME": "/x", "PATH": "/bin", "TOPGUN": "1", "topg_max_context": "1"}
    assert resolve(environ=environ).config == Config()


def test_a_misspelt_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert "did you mean 'max_context'?" in refusal(config_file(tmp_path, "execution: {max_contxt: 3}"))
    with pytest.raises(ConfigError, match=r"did you mean 'memory\.page_size'\?"):
        resolve({"memory.pagesize": "8MB"})


def test_flags_are_checked_like_a_file() -> None:
    with pytest.raises(ConfigError, match=r"execution\.max_batch_size \(--max-batch-size\)"):
        resolve({"execution.max_batch_size": True})
    with pytest.raises(ConfigError, match="is not a setting"):
        resolve({"max_batch_size": 3})


@pytest.mark.parametrize("key", SETTINGS)
def test_a_default_survives_being_shown_and_read(key: str) -> None:
    setting = SETTINGS[key]
    shown = setting.kind.show(setting.default)
    assert setting.kind.read(setting.kind.from_text(shown)) == setting.default
    assert setting.help.endswith(".")
