"""`topg pull`: fetch a model into the store."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from topg.cli.messages import say
from topg.cli.options import filled
from topg.errors import ModelNotFoundError, RequestError
from topg.hub.catalogue import CATALOGUE
from topg.hub.huggingface import HUB_PREFIX, HubSpec, pull_huggingface
from topg.hub.pull import add_local, pull_catalogue
from topg.hub.store import Store
from topg.paths import Home
from topg.progress import ProgressBar, progress_bar
from topg.units import format_size
from topg.wording import did_you_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", type=filled,
        help="a name of the catalogue below, hf:ORG/NAME[@REVISION] for a repository of the Hugging Face hub, or the "
        "path of a GGUF file or checkpoint folder to copy",
    )  # fmt: skip
    parser.add_argument(
        "--name", type=filled, help="with a path: the name to keep it under (default: that of the file or folder)"
    )
    entries = (
        f"  {model.name:<14} {model.title}, {format_size(model.transfer_size)}, {model.licence}"
        for model in CATALOGUE.values()
    )
    parser.epilog = "\n".join(["catalogue:", *entries])


def run(args: argparse.Namespace) -> int:
    store = Store(Home.find())
    with progress_bar() as bar:
        path = _pull(args.model, args.name, store, TerminalReport(bar))
    print(path)
    return 0


def _pull(model: str, name: str | None, store: Store, report: TerminalReport) -> Path:
    path = Path(model).expanduser()
    if name is not None:
        _check_name(name, model, store)
    if model in CATALOGUE:
        return pull_catalogue(CATALOGUE[model], store, report)
    if model.startswith(HUB_PREFIX):
        return pull_huggingface(HubSpec.parse(model), store, report)
    if path.exists():
        return add_local(path, name or _name_of(path), store, report, _verify)
    raise ModelNotFoundError(
        f"{model!r} is no name of the catalogue ({', '.join(CATALOGUE)}), no hf:ORG/NAME, and no path that exists"
        f"{did_you_mean(model, CATALOGUE)}"
    )


def _check_name(name: str, model: str, store: Store) -> None:
    if model in CATALOGUE or model.startswith(HUB_PREFIX):
        raise RequestError(f"--name goes with a path only, and {model!r} is none", param="name")
    try:
        store.folder(name)
    except ModelNotFoundError as error:
        raise RequestError(f"--name: {error}", param="name") from error


def _name_of(path: Path) -> str:
    """A store name from a path's last part: what a name cannot hold becomes '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().stem if path.is_file() else path.absolute().name)


def _verify(path: Path) -> None:
    """Raises when `path` is no checkpoint that can be converted and spoken to."""
    from topg.converter.blueprint import draw_blueprint
    from topg.converter.source import open_source
    from topg.converter.texts import read_texts
    from topg.precision.recipes import DEFAULT_RECIPE
    from topg.tokenizer.tokenizer import Tokenizer

    checkpoint = open_source(path)
    blueprint = draw_blueprint(checkpoint, DEFAULT_RECIPE)
    texts = read_texts(checkpoint, blueprint.config.vocab)
    Tokenizer(texts.tokenizer_json, texts.tokens, texts.chat_template)


class TerminalReport:
    """Shows the course of a pull on standard error: notes as lines, transfers as a bar."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def note(self, text: str) -> None:
        self._bar.close()
        say(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self._bar.show(what, done, total)
