"""The exception classes: bases, words, and what survives a trip between processes."""

import copy
import pickle

import pytest

from k3rs.exceptions import (
    CheckpointError,
    ConfigError,
    InputError,
    K3Error,
    MemoryBudgetError,
    NumericalFault,
    ReadError,
    SessionError,
)

BUILTINS = {
    CheckpointError: OSError,
    ConfigError: ValueError,
    InputError: ValueError,
    MemoryBudgetError: MemoryError,
    NumericalFault: ArithmeticError,
    ReadError: OSError,
    SessionError: RuntimeError,
}


@pytest.mark.parametrize("kind", [K3Error, *BUILTINS])
def test_message_and_hint_are_apart(kind: type[K3Error]) -> None:
    for error in (kind("what", "do this"), kind(message="what", hint="do this")):
        assert str(error) == "what"
        assert error.hint == "do this"
    assert kind("what").hint is None
    assert issubclass(kind, BUILTINS.get(kind, Exception))


@pytest.mark.parametrize("kind", [K3Error, *BUILTINS])
def test_copies_are_equal(kind: type[K3Error]) -> None:
    error = kind("what", "do this")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (str(twin), twin.hint, twin.args) == ("what", "do this", ("what",))


@pytest.mark.parametrize("kind", [CheckpointError, ReadError])
def test_two_arguments_are_not_an_errno(kind: type[OSError]) -> None:
    error = kind("what", "do this")
    assert (error.errno, error.strerror, error.filename) == (None, None, None)


def test_memory_budget_carries_its_numbers() -> None:
    error = MemoryBudgetError("too small", "give more", 1_000, 2_000)
    for twin in (error, pickle.loads(pickle.dumps(error))):
        assert (twin.budget_bytes, twin.minimum_bytes) == (1_000, 2_000)
    assert MemoryBudgetError("too small").minimum_bytes is None
