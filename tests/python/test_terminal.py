"""What a person at a terminal sees of `k3rs generate`."""

import re
from pathlib import Path

from harness import RunK3rs
from terminal import ERASED_LINE, watch


def test_progress_is_shown_and_then_replaced_by_the_answer_and_a_report(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    arguments: list[str | Path] = ["generate", model_path, "--ids", "3,4,5,6,7", "-n", "500"]
    answer = run_k3rs(*arguments).stdout
    status, shown = watch(tmp_path, *arguments)
    assert status == 0
    words = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split())
    assert re.search(r"token \d+ \S+ \d/\d layers 0:00:0\d, read [\d.]+ .B", words)
    assert re.search(r"\d+% of experts cached, [\d.]+ tokens/s, 0:00:0\d to go", words)
    live, left = shown.rsplit(ERASED_LINE, 1)
    assert answer not in live
    report = left.split(answer, 1)[1].splitlines()
    assert [line.split()[0] for line in report if line] == ["prompt", "found", "read"]
    assert all(len(line) <= 80 for line in report)
    assert "500 tokens (length)" in report[0]


def test_quiet_is_the_answer_alone(run_k3rs: RunK3rs, model_path: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = ["generate", model_path, "--ids", "3,4,5", "-n", "3", "--quiet"]
    assert watch(tmp_path, *arguments) == (0, run_k3rs(*arguments).stdout)
