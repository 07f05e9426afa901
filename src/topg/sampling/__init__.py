"""Choosing the next token from logits: `sampler` runs the pipeline, `random_numbers` says where chance comes from."""

from topg.sampling.random_numbers import philox4x64, uniform
from topg.sampling.sampler import Sampled, SamplerState, sample

__all__ = ["Sampled", "SamplerState", "philox4x64", "sample", "uniform"]
