"""The model that ships: where it is, what it writes, and how well it predicts."""

import re
import shlex
from pathlib import Path

import pytest
from harness import RunK3rs

import k3rs
from k3rs.exceptions import InputError
from k3rs.shipped_model import shipped_model

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "fixtures" / "held_out.txt"
REPOSITORY_BYTES = 10_000_000


@pytest.fixture(scope="module")
def card() -> str:
    return (shipped_model() / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_it_is_inside_the_package(tmp_path: Path) -> None:
    directory = shipped_model()
    assert directory == Path(k3rs.__file__).parent / "models" / "nano"
    assert sum(path.stat().st_size for path in directory.iterdir()) <= REPOSITORY_BYTES
    with pytest.raises(InputError, match="no model ships with this installation"):
        shipped_model(tmp_path)


def test_it_is_the_whole_architecture() -> None:
    config = k3rs.inspect(shipped_model())["config"]
    kinds = [layer["attention"] for layer in config["layers"]]
    assert kinds.count("mla") >= 3
    assert kinds[-2:] == ["mla", "mla"]
    assert "kda" in kinds
    assert config["moe"]["experts"] > config["moe"]["experts_per_token"] > 1


def test_it_writes_what_the_readme_shows(run_k3rs: RunK3rs) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = r"\$ k3rs (generate (?:.*\\\n)*.*)\n((?s:.*?))```"
    ((command, text),) = re.findall(pattern, readme)
    done = run_k3rs(*shlex.split(command.replace("\\\n", " ")))
    assert done.status == 0
    # The README folds long lines.
    assert done.stdout.split() == text.split()


def test_it_predicts_unseen_text_as_its_trainer_measured(run_k3rs: RunK3rs, card: str) -> None:
    """The card holds what the trainer's own forward pass gives on the same text."""
    measured = {
        name.strip(): float(nats)
        for name, nats in re.findall(r"^\| (\S.*?) +\| ([\d.]+) \|", card, re.MULTILINE)
    }
    done = run_k3rs("score", HELD_OUT, "--json")
    assert done.status == 0
    nll = done.facts["nll"]
    assert nll == pytest.approx(measured["this model"], rel=0.01)
    for baseline in ("2-gram", "5-gram"):
        assert nll < measured[baseline] - 0.05


def test_its_score_has_the_same_bits_at_any_chunking(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    (tmp_path / "part.txt").write_bytes(HELD_OUT.read_bytes()[:4000])
    whole = run_k3rs("score", "part.txt", "--json")
    assert whole.status == 0
    assert run_k3rs("score", "part.txt", "--json", "--prefill-chunk", "7").facts == whole.facts
