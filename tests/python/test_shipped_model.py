from pathlib import Path

import pytest

from k3rs.exceptions import InputError
from k3rs.shipped_model import shipped_model


def test_the_packaged_model_comes_first(tmp_path: Path) -> None:
    package = tmp_path / "python" / "k3rs"
    (package / "models" / "nano").mkdir(parents=True)
    (tmp_path / "fixtures" / "tiny_k3" / "model").mkdir(parents=True)
    shipped = shipped_model(package)
    assert (shipped.path, shipped.note) == (package / "models" / "nano", None)


def test_a_source_checkout_has_the_fixture_and_says_what_it_is(tmp_path: Path) -> None:
    fixture = tmp_path / "fixtures" / "tiny_k3" / "model"
    fixture.mkdir(parents=True)
    shipped = shipped_model(tmp_path / "python" / "k3rs")
    assert shipped.path == fixture
    assert "random weights" in str(shipped.note)


def test_without_either_a_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model ships with this installation"):
        shipped_model(tmp_path / "python" / "k3rs")
