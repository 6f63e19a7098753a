"""The `k3rs` command as a process that starts in a moment.

A helper process loads the program once and forks it for every run, so that tests can start,
kill and continue it many times. What runs is `k3rs.cli.main.main` in a process of its own.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import TIME_LIMIT_S, Completed, command_environment

from k3rs.cli.main import main
from k3rs.closing import Closing


class Running:
    """A run that was started."""

    def __init__(self, runner: "ForkingRunner", pid: int, outputs: Path) -> None:
        self._runner = runner
        self._outputs = outputs
        self.pid = pid

    def stderr(self) -> str:
        """What it has written there until now."""
        return (self._outputs / "stderr").read_text(encoding="utf-8")

    def wait_until_it_says(self, text: str) -> None:
        """Returns when `text` is in what it has written to stderr."""
        give_up_at = time.monotonic() + TIME_LIMIT_S
        while text not in self.stderr():
            assert time.monotonic() < give_up_at, self.stderr()
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, which comes to nothing if it has ended."""
        os.kill(self.pid, number)

    def wait(self) -> Completed:
        """What it left; the status of a killed one is the negative signal."""
        status = os.waitstatus_to_exitcode(self._runner.wait_for(self.pid))
        stdout = (self._outputs / "stdout").read_text(encoding="utf-8")
        return Completed(status, stdout, self.stderr())


class ForkingRunner(Closing):
    """Starts runs of the command, with `environment` in addition to the usual one."""

    def __init__(self, **environment: str) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._count = 0
        self._helper = subprocess.Popen(
            [sys.executable, __file__],
            # Threads of numpy would not survive the fork.
            env=command_environment(OPENBLAS_NUM_THREADS="1", **environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends it, and removes what its runs have said."""
        self._helper.communicate(timeout=TIME_LIMIT_S)
        self._outputs.cleanup()

    def start(
        self, *arguments: str | Path, file_bytes_max: int | None = None, **environment: str
    ) -> Running:
        """Begins a run, which then can write no file of more than `file_bytes_max`."""
        self._count += 1
        outputs = Path(self._outputs.name, str(self._count))
        outputs.mkdir()
        for name in ("stdout", "stderr"):
            (outputs / name).touch()
        order = {
            "arguments": [str(argument) for argument in arguments],
            "environment": environment,
            "outputs": str(outputs),
            "file_bytes_max": file_bytes_max,
        }
        return Running(self, int(self._ask(order)), outputs)

    def run(
        self, *arguments: str | Path, file_bytes_max: int | None = None, **environment: str
    ) -> Completed:
        """A run from its beginning to its end."""
        return self.start(*arguments, file_bytes_max=file_bytes_max, **environment).wait()

    def wait_for(self, pid: int) -> int:
        """The wait status of a run."""
        return int(self._ask({"wait_for": pid}))

    def _ask(self, order: Mapping[str, Any]) -> str:
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.write(json.dumps(order) + "\n")
        self._helper.stdin.flush()
        return self._helper.stdout.readline()


def _serve() -> None:
    for slow_to_load in ("hub", "cli.commands.download", "cli.commands.verify"):
        importlib.import_module(f"k3rs.{slow_to_load}")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait_for" in order:
            answer = os.waitpid(order["wait_for"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                _become(order)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _become(order: Mapping[str, Any]) -> None:
    status = 70
    try:
        signal.alarm(TIME_LIMIT_S)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            path = Path(os.devnull) if number == 0 else Path(order["outputs"], name)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
        os.environ.update(order["environment"])
        if order["file_bytes_max"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes_max"],) * 2)
        status = main(order["arguments"])
    finally:
        os._exit(status)


if __name__ == "__main__":
    _serve()
