"""From what a user calls a model to the checkpoint on disk."""

from __future__ import annotations

import os
from pathlib import Path

from topg.errors import ModelNotFoundError
from topg.hub.catalogue import CATALOGUE
from topg.hub.huggingface import HUB_PREFIX, HubSpec
from topg.hub.store import Store
from topg.paths import Home
from topg.wording import did_you_mean


def resolve(name: str, store: Store | None = None) -> Path:
    """The checkpoint that `name` stands for: a pulled model's name, `hf:ORG/NAME`, or a path.

    What looks like a path (it holds a separator or starts with '.' or '~') is one; a bare word is a pulled model first
    and a path second.  `store` is by default that of the environment's home.  Nothing is fetched: raises
    ModelNotFoundError, which says what exists and how to get the rest.
    """
    if not name:
        raise ModelNotFoundError("the name of the model is empty; give a pulled name, hf:ORG/NAME or a path")
    store = store or Store(Home.find())
    if name.startswith(HUB_PREFIX):
        return _pulled(HubSpec.parse(name).store_name, name, store)
    path = Path(name).expanduser()
    if os.sep in name or "/" in name or name.startswith((".", "~")):
        if not path.exists():
            raise ModelNotFoundError(f"there is nothing at {name}; {_what_exists(store)}")
        return path
    return path if path.exists() and name not in store.names() else _pulled(name, name, store)


def _pulled(name: str, asked: str, store: Store) -> Path:
    if name not in store.names():
        can_pull = asked in CATALOGUE or asked.startswith(HUB_PREFIX)
        advice = f"run `topg pull {asked}`" if can_pull else f"`topg pull` knows {', '.join(CATALOGUE)} and hf:ORG/NAME"
        nearest = did_you_mean(asked, {*store.names(), *CATALOGUE} - {asked})
        raise ModelNotFoundError(f"no model is named {asked!r}; {advice}; {_what_exists(store)}{nearest}")
    return store.model_path(name)


def _what_exists(store: Store) -> str:
    names = ", ".join(store.names()) or "none"
    return f"pulled models: {names}"
