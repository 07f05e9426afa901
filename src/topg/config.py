"""The configuration: every key with its default, range and help written once, and one place that resolves them.

A value comes from the first of these that has it:

    flag  >  environment variable  >  configuration file  >  default

From the fields below come the YAML keys (`execution.max_batch_size`), the environment variables
(`TOPG_EXECUTION_MAX_BATCH_SIZE`), the flags (`--max-batch-size`) and docs/config.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from topg.config_file import Given, read_config_file
from topg.config_kinds import Choice, Kind, Share, Size, Switch, Whole
from topg.errors import ConfigError
from topg.wording import did_you_mean

KVCacheType = Literal["auto", "bfloat16", "float32", "int8"]
BackendChoice = Literal["auto", "native", "torch"]

CONFIG_VARIABLE = "TOPG_CONFIG"
HOME_VARIABLE = "TOPG_HOME"
ISA_VARIABLE = "TOPG_ISA"
VARIABLE_PREFIX = "TOPG_"

T = TypeVar("T")


def _setting(default: T, kind: Kind, help: str) -> T:
    """A field of a section.  Typed as its value, as `dataclasses.field` is."""
    return field(default=default, metadata={"kind": kind, "help": help})


class _Section:
    """Settings that belong together.  Checked when made, also by hand: raises ConfigError, naming the key."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for member in fields(self):  # type: ignore[arg-type]  # the subclasses are dataclasses
            kind, value = member.metadata["kind"], getattr(self, member.name)
            if not kind.accepts(value):
                raise ConfigError(f"{self.section}.{member.name}: {kind.refuse(value)}")


@dataclass(frozen=True)
class ExecutionConfig(_Section):
    """How steps are computed."""

    section: ClassVar[str] = "execution"

    max_batch_size: int = _setting(
        16, Whole(1, 4096), "Sequences computed together at most; no more than prefill_chunk, since each takes a "
        "token of a step."
    )  # fmt: skip
    max_context: int = _setting(
        4096, Whole(1, 2**24), "Tokens of a sequence at most, prompt and completion together; the model's own limit "
        "still holds."
    )  # fmt: skip
    prefill_chunk: int = _setting(
        512, Whole(1, 2**20), "Tokens of one step at most; at least max_batch_size, since each sequence of a batch "
        "takes a token of a step. A longer prompt is computed in chunks; the answer does not depend on it."
    )  # fmt: skip
    enable_flash_attn: bool = _setting(
        True, Switch(), "Compute attention in blocks with a running softmax, so that the scores of all keys never "
        "stand in memory at once. The native back end has no other way and refuses false."
    )  # fmt: skip
    kv_cache_dtype: KVCacheType = _setting(  # noqa: RUF009  (it makes a field, which ruff cannot see here)
        "auto", Choice("auto", "bfloat16", "float32", "int8"), "Number type of cached keys and values. auto: float32 "
        "for a float32 model, bfloat16 for every other."
    )  # fmt: skip
    backend: BackendChoice = _setting(  # noqa: RUF009
        "auto", Choice("auto", "native", "torch"), "What computes. native: ToPG's own kernels on the processor; torch: "
        "PyTorch, installed with topg[torch], also for a GPU. auto: native on device cpu, torch on every other."
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size > self.prefill_chunk:
            raise ConfigError(
                f"execution.max_batch_size is {self.max_batch_size} and execution.prefill_chunk is "
                f"{self.prefill_chunk}; every sequence of a batch takes a token of a step, so raise prefill_chunk to "
                f"{self.max_batch_size} or lower max_batch_size to {self.prefill_chunk}"
            )


@dataclass(frozen=True)
class MemoryConfig(_Section):
    """How memory is shared out.  `page_size` is in bytes, None standing for `auto`; `preallocate` is from 0 to 1."""

    section: ClassVar[str] = "memory"

    page_size: int | None = _setting(
        None, Size(1, 2**40, auto=True), "Size of a page of the KV cache. auto: 4MB, and at most 64 tokens. A size "
        "given here is obeyed whatever the tokens."
    )  # fmt: skip
    preallocate: float = _setting(
        0.8, Share(0.01, 1.0), "Share of the free memory that the pages of the KV cache may take at most."
    )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """All settings.  Nobody changes it after `resolve` made it."""

    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


@dataclass(frozen=True)
class Setting(Generic[T]):
    """What is known of one key."""

    section: str
    name: str
    default: T
    kind: Kind
    help: str

    @property
    def key(self) -> str:
        """Its name in files and messages: `execution.max_batch_size`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable: `TOPG_EXECUTION_MAX_BATCH_SIZE`."""
        return f"{VARIABLE_PREFIX}{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        """Its command line flag: `--max-batch-size`."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Resolved:
    """A configuration, and for each key where its value came from: a flag, a variable, `FILE, line N` or `default`."""

    config: Config
    origins: Mapping[str, str]

    def is_default(self, key: str) -> bool:
        """Whether nobody set `key`."""
        return self.origins[key] == "default"

    def __str__(self) -> str:
        """One line a setting: its key, its value and where that came from."""
        return "\n".join(
            f"{key}: {setting.kind.show(self.value(key))}  # {self.origins[key]}" for key, setting in SETTINGS.items()
        )

    def value(self, key: str) -> Any:
        """The value of `section.name`."""
        section, name = key.split(".")
        return getattr(getattr(self.config, section), name)


SECTIONS: Mapping[str, type[Any]] = MappingProxyType({part.section: part for part in (ExecutionConfig, MemoryConfig)})


def _describe(section: str, member: Field[Any]) -> Setting[Any]:
    if member.default is MISSING:
        raise TypeError(f"{section}.{member.name} has no default")
    return Setting(section, member.name, member.default, member.metadata["kind"], member.metadata["help"])


SETTINGS: Mapping[str, Setting[Any]] = MappingProxyType(
    {
        setting.key: setting
        for section, section_type in SECTIONS.items()
        for setting in (_describe(section, member) for member in fields(section_type))
    }
)


def resolve(
    flags: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
    file: Path | None = None,
) -> Resolved:
    """The configuration in force: flag over environment over file over default.

    `flags` maps keys (`memory.page_size`) to values as a YAML file would hold them (16, True, "4MB").  `file` falls
    back to the variable TOPG_CONFIG; no other file is looked for.  Raises ConfigError for an unknown key, a wrong type
    and a value out of range, naming the key and where it was given.
    """
    layers = (_given_flags(flags), _given_variables(environ), _given_in_file(file, environ))
    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    origins = {}
    for key, setting in SETTINGS.items():
        given = next((layer[key] for layer in layers if key in layer), None)
        values[setting.section][setting.name] = setting.default if given is None else given.value
        origins[key] = "default" if given is None else given.origin
    config = Config(**{section: SECTIONS[section](**members) for section, members in values.items()})
    return Resolved(config, MappingProxyType(origins))


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that begins with TOPG_ and has no meaning: it is a misspelt one."""
    known = [HOME_VARIABLE, CONFIG_VARIABLE, ISA_VARIABLE, *(setting.variable for setting in SETTINGS.values())]
    for name in sorted(environ):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            raise ConfigError(
                f"{name} is not a variable of ToPG; the variables are {', '.join(known)}{did_you_mean(name, known)}"
            )


def _given_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    unknown = [key for key in flags if key not in SETTINGS]
    if unknown:
        nearest = did_you_mean(unknown[0], SETTINGS)
        raise ConfigError(f"{unknown[0]!r} is not a setting; the settings are {', '.join(SETTINGS)}{nearest}")
    return {key: _read(SETTINGS[key], Given(value, SETTINGS[key].flag)) for key, value in flags.items()}


def _given_variables(environ: Mapping[str, str]) -> dict[str, Given]:
    check_variables(environ)
    return {
        key: _read(setting, Given(setting.kind.from_text(environ[setting.variable]), setting.variable))
        for key, setting in SETTINGS.items()
        if setting.variable in environ
    }


def _given_in_file(file: Path | None, environ: Mapping[str, str]) -> dict[str, Given]:
    if file is None and CONFIG_VARIABLE in environ:
        if not environ[CONFIG_VARIABLE]:
            raise ConfigError(f"{CONFIG_VARIABLE} is empty; name a configuration file, or unset it")
        file = Path(environ[CONFIG_VARIABLE])
    if file is None:
        return {}
    given = read_config_file(file, {key: (setting.section, setting.name) for key, setting in SETTINGS.items()})
    return {key: _read(SETTINGS[key], value) for key, value in given.items()}


def _read(setting: Setting[Any], given: Given) -> Given:
    try:
        return Given(setting.kind.read(given.value), given.origin)
    except ConfigError as error:
        raise ConfigError(f"{setting.key} ({given.origin}): {error}") from None
