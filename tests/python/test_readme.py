"""The examples of the README run as they are printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_python_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    generated, said = capsys.readouterr().out.split("TextPiece", 1)
    assert len(generated.splitlines()) == 8 + 16
    assert said.count("channel='content'") >= 4
    assert getattr(names["logits"], "shape", None) == (2304,)


def test_links_to_files_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^):]+)\)", text):
            assert (ROOT / target).exists(), f"{document}: {target}"
