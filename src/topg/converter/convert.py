"""From a checkpoint to a converted model.

    open the source -> read its config -> settle every tensor's source and precision -> check all of it
        -> tokenizer, special tokens, template -> write the weights -> write the manifest -> put the folder in place

Everything that can be refused is refused before the weights are touched, and the output folder appears whole or not at
all.  The same source and recipe give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topg import __version__
from topg.converter.blueprint import Blueprint, draw_blueprint
from topg.converter.format import ConvertedModel
from topg.converter.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    SourceRecord,
    TensorRecord,
)
from topg.converter.source import open_source
from topg.converter.staging import staged_folder
from topg.converter.target import check_target
from topg.converter.texts import ModelTexts, read_texts
from topg.converter.weights import Progress, TensorJob, write_weights
from topg.files import require_space, sha256_of
from topg.precision.recipes import DEFAULT_RECIPE, KEEP, recipe

SPARE_BYTES = 1 << 20  # file headers and the manifest, beside weights and tokenizer
SPACE_ADVICE = "free some space, write elsewhere, or choose a smaller precision"


@dataclass(frozen=True)
class Conversion:
    """What a conversion made.  Sizes are in bytes, all files together; `warnings` are sentences for the user."""

    path: Path
    recipe: str
    source_bytes: int
    nbytes: int
    warnings: tuple[str, ...]


class ModelConverter:
    """Converts one checkpoint.

        ModelConverter("smollm2-135m", "smol-int8", "int8").convert()

    hf_model_name   a Hugging Face folder, a .gguf file, or the name of a pulled model
    output_dir      the folder to write; it must not exist, unless `overwrite` is set and it is a converted model
    quant_config    name of a recipe (default: int8)
    name            what the manifest calls the model (default: the output folder's name)
    progress        called with the bytes of weights stored so far, and in all
    resolve         turns `hf_model_name` into a path (default: the store of pulled models)
    """

    def __init__(
        self,
        hf_model_name: str | Path,
        output_dir: str | Path,
        quant_config: str | None = None,
        *,
        name: str | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
        resolve: Callable[[str], Path] | None = None,
    ) -> None:
        """Raises PrecisionError for an unknown recipe."""
        self._name = hf_model_name
        self._output = Path(output_dir)
        self._model_name = name or self._output.name
        self._recipe = _recipe_name(quant_config)
        self._overwrite = overwrite
        self._progress = progress or _no_progress
        self._resolve = resolve or _pulled_model

    def convert(self) -> Path:
        """Convert, and return the folder; raises as `run`."""
        return self.run().path

    def run(self) -> Conversion:
        """Convert, and say what was made.

        Raises ConfigError for an output that may not be written, ModelError for a checkpoint that cannot be found,
        read or used, PrecisionError for a recipe it cannot be given, CapacityError when the disk is too small.
        """
        check_target(self._output, self._overwrite)
        checkpoint = open_source(self._path())
        blueprint = draw_blueprint(checkpoint, self._recipe)
        texts = read_texts(checkpoint, blueprint.config.vocab)
        size = blueprint.nbytes + len(texts.tokenizer_json.encode()) + SPARE_BYTES
        require_space(self._output, size, SPACE_ADVICE)
        source = SourceRecord(_source_name(self._name), {path.name: sha256_of(path) for path in checkpoint.files()})
        with staged_folder(self._output, replace=self._overwrite) as folder:
            files = write_weights(blueprint.jobs, checkpoint, folder, self._progress)
            files[TOKENIZER_FILE] = _write_text(folder / TOKENIZER_FILE, texts.tokenizer_json)
            manifest = _manifest(self._recipe, self._model_name, blueprint, texts, source, files)
            _write_text(folder / MANIFEST_FILE, json.dumps(manifest.to_json(), indent=1))
            ConvertedModel.open(folder)  # what is put in place can be opened
        warnings = (*checkpoint.warnings, *blueprint.warnings, *texts.warnings)
        sizes = _total_bytes(checkpoint.files()), _total_bytes(self._output.iterdir())
        return Conversion(self._output, self._recipe, *sizes, warnings)

    def _path(self) -> Path:
        return self._name if isinstance(self._name, Path) else self._resolve(self._name)


def _pulled_model(name: str) -> Path:
    # Imported here, since a conversion from a path needs no store and the modules of this package know none.
    from topg.hub.resolve import resolve
    from topg.hub.store import Store
    from topg.paths import Home

    return resolve(name, Store(Home.find()))


def _recipe_name(quant_config: str | None) -> str:
    name = DEFAULT_RECIPE if quant_config is None else quant_config
    return name if name == KEEP else recipe(name).name


def _no_progress(done: int, total: int) -> None:
    pass


def _source_name(name: str | Path) -> str:
    """How the source was called, without the folders of this machine."""
    return Path(name).name or str(name)


def _manifest(
    recipe_name: str, name: str, blueprint: Blueprint, texts: ModelTexts, source: SourceRecord, files: dict[str, str]
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        topg_version=__version__,
        name=name,
        architecture=blueprint.architecture.model_type,
        context=blueprint.config.context,
        recipe=recipe_name,
        plan=blueprint.plan,
        tensors=_records(blueprint.jobs),
        tokens=texts.tokens,
        chat_template=texts.chat_template,
        generation=texts.generation,
        source=source,
        files=files,
    )


def _records(jobs: Sequence[TensorJob]) -> dict[str, TensorRecord]:
    return {
        job.spec.name: TensorRecord(job.spec.shape, job.spec.role, job.spec.layer, job.precision) for job in jobs
    }  # fmt: skip


def _write_text(path: Path, text: str) -> str:
    """Write a file; returns the SHA-256 of its contents."""
    path.write_text(text, encoding="utf-8", newline="")
    return sha256_of(path)


def _total_bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
