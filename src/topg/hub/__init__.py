"""Fetching models: the catalogue, the Hugging Face hub, and the store they are put in."""

from __future__ import annotations

from topg.hub.resolve import resolve as resolve

__all__ = ["resolve"]
