"""The one exception tree.

    TopgError
    ├── ConfigError            a configuration key, value or file is wrong
    ├── RequestError           a prompt, message or sampling parameter is wrong (also a ValueError)
    │   ├── PromptTooLongError
    │   └── ChatTemplateError  the model's chat template refused or failed
    ├── ModelError             a model cannot be found, read or used
    │   ├── ModelNotFoundError
    │   ├── DownloadError      a transfer failed, or what arrived is not what was pinned
    │   ├── CheckpointError    a file is damaged, or its tensors do not fit its config
    │   └── UnsupportedModelError  an architecture, tensor type or setting ToPG does not know
    ├── PrecisionError         a recipe is unknown, or cannot be met for this model
    ├── BackendError           a back end is not installed, or has no kernel for an op
    ├── CapacityError          memory, disk space or KV pages do not suffice
    └── ComputeError           a step produced no usable numbers (NaN or infinite logits)

A message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations


class TopgError(Exception):
    """Base of every error ToPG raises on purpose."""


class ConfigError(TopgError):
    """A configuration key, value or file is wrong; the message names the key."""


class RequestError(TopgError, ValueError):
    """A prompt, message or sampling parameter is wrong.

    `param` names the offending field as the caller wrote it, or is None when no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt, or the prompt plus the tokens asked for, does not fit the context."""


class ChatTemplateError(RequestError):
    """The chat template is missing, refused the messages, or went over its limits."""


class ModelError(TopgError):
    """A model cannot be found, read or used."""


class ModelNotFoundError(ModelError):
    """No model stands under the given name or path."""


class DownloadError(ModelError):
    """A transfer failed, or what arrived is not what was pinned."""


class CheckpointError(ModelError):
    """A file is damaged, or its tensors do not fit its config."""


class UnsupportedModelError(ModelError):
    """An architecture, tensor type or setting that ToPG does not know."""


class PrecisionError(TopgError):
    """A recipe is unknown, or cannot be met for this model."""


class BackendError(TopgError):
    """A back end is not installed, or has no kernel for an op of the plan."""


class CapacityError(TopgError):
    """Memory, disk space or KV pages do not suffice for what was asked."""


class ComputeError(TopgError):
    """A step produced no usable numbers."""
