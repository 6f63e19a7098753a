"""The examples of the README run as they are printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_python_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert getattr(names["logits"], "shape", None) == (2304,)


def test_links_to_files_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^):]+)\)", text):
            assert (ROOT / target).exists(), f"{document}: {target}"
