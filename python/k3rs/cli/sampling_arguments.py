"""The sampler that a command line asks for."""

import argparse
import secrets
from collections.abc import Mapping
from typing import Any

import k3rs

__all__ = ["sampler_facts", "sampler_from"]

_CHOOSING = ("temperature", "top_k", "top_p", "min_p", "seed")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def sampler_from(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> k3rs.Sampler:
    """The sampler of the arguments that were given, and `defaults` for the others.

    Without defaults, temperature, filters and seed it is greedy.
    """
    given = {**(defaults or {}), **_given(arguments, _CHOOSING)}
    if given:
        given.setdefault("temperature", 1.0)
        # Chosen here rather than by the sampler, so that a report can name it.
        given.setdefault("seed", secrets.randbits(32))
    return k3rs.Sampler(**given, **_given(arguments, _PENALTIES))


def sampler_facts(sampler: k3rs.Sampler) -> dict[str, Any]:
    """What a sampler does, by the names of its arguments."""
    return {name: getattr(sampler, name) for name in _CHOOSING + _PENALTIES}


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
