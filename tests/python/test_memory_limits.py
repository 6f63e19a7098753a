"""What the machine allows: memory, shared with others, and processes.

A budget is kept or refused, never overrun, and `auto` takes what is really left.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TIME_LIMIT_S, Completed, Prompt, RunK3rs, command_environment, joined
from numpy.typing import NDArray

import k3rs
from k3rs.exceptions import MemoryBudgetError

MB = 10**6
STEADY_BYTES = 50 * MB
TOKENS = 6
# No user of the machine has it, so all its processes are those of the test.
UNPRIVILEGED_ID = 64_321
READER_THREADS = 16


def generation(model_path: Path, prompt: Prompt, *options: str) -> list[str]:
    """Arguments that have the command write the first tokens of a known continuation."""
    return [
        "generate", str(model_path), "--ids", joined(prompt.ids), "-n", str(TOKENS),
        "--ignore-stop", "--threads", "1", "--json", "-", *options,
    ]  # fmt: skip


def start(*arguments: str, within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Starts the command, through the program of `within` if one is given."""
    return subprocess.Popen(
        [*within, sys.executable, "-m", "k3rs", *arguments],
        cwd="/",
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> Completed:
    try:
        stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.kill()
    return Completed(process.returncode, stdout.decode(), stderr.decode())


def run(*arguments: str, within: tuple[str, ...] = ()) -> Completed:
    return finish(start(*arguments, within=within))


def facts_of(done: Completed) -> dict[str, Any]:
    assert done.status == 0, done.stderr
    return done.facts


# A budget that is just too small


def test_one_byte_below_the_smallest_budget_is_refused_before_loading(
    run_k3rs: RunK3rs, model_path: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[1]
    positions = len(prompt.ids) + TOKENS
    plan = k3rs.plan(model_path, k3rs.MemoryRequest(10**9), positions=positions, threads=1)
    minimum = plan["minimum_bytes"]

    refused = run_k3rs(*generation(model_path, prompt, "--memory", f"{minimum - 1}B"))
    assert (refused.status, refused.stdout) == (3, "")
    error, hint = refused.stderr.splitlines()
    assert error.startswith(f"error: a memory budget of {minimum - 1} bytes is too small: ")
    assert "1 bytes are missing" in error
    assert hint == f"hint: the smallest budget that is accepted is {minimum} bytes"

    facts = facts_of(run_k3rs(*generation(model_path, prompt, "--memory", f"{minimum}B")))
    assert facts["generated_ids"] == prompt.greedy[:TOKENS]
    assert facts["plan"]["budget_bytes"] == minimum
    assert facts["memory"]["peak_rss_bytes"] <= minimum


def test_the_refusal_carries_both_budgets(model_path: Path) -> None:
    minimum = k3rs.plan(model_path, k3rs.MemoryRequest(10**9))["minimum_bytes"]
    with pytest.raises(MemoryBudgetError) as refused:
        k3rs.Model.open(model_path, memory=minimum - 1)
    assert (refused.value.budget_bytes, refused.value.minimum_bytes) == (minimum - 1, minimum)
    assert str(minimum) in str(refused.value.hint)
    with k3rs.Model.open(model_path, memory=minimum) as model:
        assert model.plan["budget_bytes"] == minimum


# Several at once


def test_two_models_in_one_process_take_turns(
    model: k3rs.Model, model_path: Path, prompts: list[Prompt]
) -> None:
    def steps(opened: k3rs.Model, prompt: Prompt) -> Iterator[tuple[int, NDArray[np.float32]]]:
        logits: list[NDArray[np.float32]] = []
        for token in opened.generate(
            prompt.ids, max_tokens=TOKENS, stop_ids=(), on_logits=logits.append
        ):
            yield token.id, logits[-1]

    pair = prompts[0], prompts[-1]
    alone = [list(steps(model, prompt)) for prompt in pair]
    with k3rs.Model.open(model_path) as first, k3rs.Model.open(model_path) as second:
        runs = [steps(opened, prompt) for opened, prompt in zip((first, second), pair, strict=True)]
        turns = list(zip(*runs, strict=True))
    for prompt, expected, found in zip(pair, alone, zip(*turns, strict=True), strict=True):
        assert [token_id for token_id, _ in found] == prompt.greedy[:TOKENS]
        for (_, logits), (_, expected_logits) in zip(found, expected, strict=True):
            assert (logits.view(np.uint32) == expected_logits.view(np.uint32)).all()


def test_two_processes_at_once(model_path: Path, prompts: list[Prompt]) -> None:
    processes = [
        start(*generation(model_path, prompt, "--memory", "auto")) for prompt in prompts[:2]
    ]
    for process, prompt in zip(processes, prompts, strict=False):
        assert facts_of(finish(process))["generated_ids"] == prompt.greedy[:TOKENS]


@contextmanager
def memory_held_elsewhere(size_bytes: int, *within: str) -> Iterator[None]:
    """Another process that has written to so much memory and keeps it."""
    hold = f"held = b'x' * {size_bytes}; print('held', flush=True); input()"
    with subprocess.Popen(
        [*within, sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


def available_bytes() -> int:
    """What the kernel says is left of the machine's memory."""
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def available_and_budget(model_path: Path) -> tuple[int, int]:
    """What is left and what `auto` makes of it, in a moment in which the former is steady."""
    for _ in range(20):
        before = available_bytes()
        budget = facts_of(run("plan", str(model_path), "--json"))["plan"]["budget_bytes"]
        if abs(available_bytes() - before) < STEADY_BYTES:
            return before, budget
    pytest.skip("other programs take and free too much memory here")


def test_auto_is_what_other_processes_leave(model_path: Path) -> None:
    if available_bytes() < 4000 * MB:
        pytest.skip("less than 4 GB of memory are available here")
    available_before, budget_before = available_and_budget(model_path)
    with memory_held_elsewhere(1000 * MB):
        available, budget = available_and_budget(model_path)
    # Not 1 GB exactly: the machine has other work. Up to a tenth is margin.
    taken = available_before - available
    assert 0.9 * taken - 2 * STEADY_BYTES < budget_before - budget < taken + 2 * STEADY_BYTES


# Control groups


@dataclass(frozen=True)
class MemoryGroup:
    """A control group of this test alone."""

    directory: Path
    limit_file: str

    def limit(self, size_bytes: int) -> int:
        """Sets the limit; returns what the kernel made of it."""
        path = self.directory / self.limit_file
        path.write_text(str(size_bytes))
        return int(path.read_text())

    @property
    def within(self) -> tuple[str, ...]:
        """A program that runs its arguments in the group."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.directory / "cgroup.procs"))

    def plan(self, model_path: Path) -> dict[str, Any]:
        """The plan of `--memory auto` in the group."""
        done = run("plan", str(model_path), "--json", "--memory", "auto", within=self.within)
        plan: dict[str, Any] = facts_of(done)["plan"]
        return plan


def group_places() -> Iterator[tuple[Path, str]]:
    """Where a group with a memory limit may be made, and the file of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory" + own), "memory.limit_in_bytes"
        elif not controllers:
            # Of the second version, a group that has processes has no groups with limits.
            root = Path("/sys/fs/cgroup")
            for above in [Path(own), *Path(own).parents]:
                yield root / above.relative_to("/"), "memory.max"


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """An empty memory group below that of this process."""
    for place, limit_file in group_places():
        directory = place / f"k3rs-test-{os.getpid()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            found = MemoryGroup(directory, limit_file)
            if (directory / limit_file).exists() and run("--version", within=found.within).stdout:
                yield found
                return
        finally:
            directory.rmdir()
    pytest.skip("no control group with a memory limit can be made here")


def test_auto_keeps_to_the_limit_of_a_control_group(
    group: MemoryGroup, model_path: Path, prompts: list[Prompt]
) -> None:
    limit = group.limit(300 * MB)
    plan = group.plan(model_path)
    # Less a tenth as margin, and what the kernel counts besides the process itself.
    assert 0.7 * limit < plan["budget_bytes"] <= limit - limit // 10
    assert plan["budget_source"].startswith(f"limit of {limit} bytes in {group.directory}, less")
    prompt = prompts[-1]
    facts = facts_of(run(*generation(model_path, prompt), within=group.within))
    assert facts["generated_ids"] == prompt.greedy[:TOKENS]
    assert facts["plan"]["budget_bytes"] <= limit - limit // 10
    assert facts["memory"]["peak_rss_bytes"] < limit


def test_auto_is_what_others_in_the_group_leave(group: MemoryGroup, model_path: Path) -> None:
    group.limit(1000 * MB)
    before = group.plan(model_path)["budget_bytes"]
    with memory_held_elsewhere(400 * MB, *group.within):
        during = group.plan(model_path)["budget_bytes"]
    assert 0.9 * 350 * MB < before - during < 0.9 * 440 * MB


def test_auto_is_what_the_process_itself_leaves(group: MemoryGroup, model_path: Path) -> None:
    """What the plan has no entry for, such as another model, cannot be given away again."""
    script = (
        "import json, sys, k3rs\n"
        "def budget(): return k3rs.plan(sys.argv[1])['plan']['budget_bytes']\n"
        "before = budget()\n"
        "held = b'x' * 400_000_000\n"
        "print(json.dumps([before, budget()]))\n"
    )
    group.limit(1000 * MB)
    done = subprocess.run(
        [*group.within, sys.executable, "-c", script, str(model_path)],
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    before, during = json.loads(done.stdout)
    # Of what the process holds, 115 MB are what the plan itself counts for it.
    assert 0.9 * 280 * MB < before - during < 0.9 * 440 * MB


def test_a_model_larger_than_the_limit_of_its_group_runs_within_it(
    group: MemoryGroup, tmp_path: Path
) -> None:
    """Its matrices are holes in a file, 4.8 GB to read; the kernel ends what takes too much."""
    sizes = ["--layers", "2", "--experts", "16", "--vocab", "1000"]
    assert run("synth", str(tmp_path / "model"), "--sparse", *sizes).status == 0
    limit = group.limit(700 * MB)
    done = run(
        "generate", str(tmp_path / "model"), "--ids", "1", "-n", "2", "--ignore-stop",
        "--json", "-", within=group.within,
    )  # fmt: skip
    facts = facts_of(done)
    # All logits are zero, and of equals the first is taken.
    assert facts["generated_ids"] == [0, 0]
    assert facts["io"]["trunk_bytes_read"] > limit
    assert facts["memory"]["peak_rss_bytes"] <= facts["plan"]["budget_bytes"] < limit


def test_what_the_group_cannot_hold_is_refused(group: MemoryGroup, model_path: Path) -> None:
    limit = group.limit(140 * MB)
    done = run("generate", str(model_path), "--ids", "1", within=group.within)
    assert (done.status, done.stdout) == (3, "")
    assert "bytes are missing" in done.stderr
    assert "\nhint: the smallest budget that is accepted is " in done.stderr
    assert int(done.stderr.split("accepted is ")[1].split()[0]) > 0.9 * limit


# Processes


@pytest.fixture
def as_nobody() -> tuple[str, ...]:
    """A program that runs its arguments as a user without rights, but to read any file.

    The interpreter may be in a home directory.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become a user that has no other processes")
    if shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        pytest.skip("there is no `setpriv` or no `prlimit` here")
    user = str(UNPRIVILEGED_ID)
    capability = "+dac_read_search"
    within = (
        "setpriv", "--reuid", user, "--regid", user, "--clear-groups",
        "--inh-caps", capability, "--ambient-caps", capability,
    )  # fmt: skip
    if run("--version", within=within).stdout != f"k3rs {k3rs.__version__}\n":
        pytest.skip("another user cannot run the interpreter or the package here")
    return within


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8, *range(READER_THREADS, READER_THREADS + 8), 100])
def test_a_full_process_table_is_an_error_with_a_cure_or_does_not_matter(
    as_nobody: tuple[str, ...],
    model_path: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    # Numpy starts threads of its own, and does not survive it when it cannot.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    within = (*as_nobody, "prlimit", f"--nproc={limit}")
    done = run(*generation(model_path, prompts[0], "--quiet"), within=within)
    if done.status == 0:
        assert limit > 1, "one thread cannot both read and compute"
        assert done.facts["generated_ids"] == prompts[0].greedy[:TOKENS]
        return
    assert limit < 100
    assert "panicked" not in done.stderr
    assert (done.status, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: cannot start ")
    assert hint.startswith("hint: ")
    assert "ulimit -u" in hint
