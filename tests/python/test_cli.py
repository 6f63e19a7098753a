"""The `k3rs` command as a process: what it prints, where, and its exit status."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import (
    PLAN_KEYS,
    TIME_LIMIT_S,
    Prompt,
    RunK3rs,
    command_environment,
    file_names,
    interrupt_generation,
    joined,
)

import k3rs

RUN_KEYS = {
    "model": {"path", "layers", "hidden", "vocab", "parameters", "fingerprint"},
    "plan": PLAN_KEYS,
    "time": {"open_s", "prefill_s", "decode_s", "tokens_per_s", "seconds_per_token", "steps_s"},
    "io": {"trunk_bytes_read", "expert_bytes_read", "read_wait_s", "direct", "why"},
    "experts": {"requests", "hits", "distinct"},
    "memory": {"peak_rss_bytes"},
}


def text_of(model: k3rs.Model, ids: list[int]) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(ids)


def test_the_answer_is_all_of_stdout(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[-1]
    done = run_k3rs("generate", model_path, "--ids", joined(prompt.ids), "-n", 24, "--ignore-stop")
    assert done.status == 0
    assert done.stdout == text_of(model, prompt.greedy) + "\n"
    assert "24 tokens (length)" in done.stderr


def test_without_a_tokenizer_the_answer_is_ids(
    run_k3rs: RunK3rs, without_tokenizer: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[0]
    done = run_k3rs("generate", without_tokenizer, "--ids", joined(prompt.ids), "-n", 5, "--quiet")
    assert done.status == 0
    assert done.stdout == joined(prompt.greedy[:5]) + "\n"
    assert done.stderr == ""


def test_text_without_a_tokenizer_is_refused(run_k3rs: RunK3rs, without_tokenizer: Path) -> None:
    done = run_k3rs("generate", without_tokenizer, "--prompt", "the")
    assert done.status == 2
    assert "found no tiktoken.model\nhint: give the prompt as --ids" in done.stderr


def test_without_a_model_the_shipped_one_runs(run_k3rs: RunK3rs) -> None:
    done = run_k3rs("generate", "--prompt", "the", "-n", 2, "--json", "-")
    assert done.status == 0
    assert done.facts["model"]["path"] == str(k3rs.shipped_model())


def test_the_json_of_a_run(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[-1]
    done = run_k3rs(
        "generate", model_path, "--ids", joined(prompt.ids), "-n", 6, "--ignore-stop",
        "--memory", "1GB", "--threads", 1, "--json", "-",
    )  # fmt: skip
    assert done.status == 0
    facts = done.facts
    others = {
        *("loaded_positions", "prompt_ids", "generated_ids", "text", "stop_reason", "options"),
        "logprobs",
    }
    assert facts.keys() == RUN_KEYS.keys() | others
    for name, keys in RUN_KEYS.items():
        assert facts[name].keys() == keys, name
    assert facts["prompt_ids"] == prompt.ids
    assert (facts["loaded_positions"], facts["logprobs"]) == (0, None)
    assert facts["generated_ids"] == prompt.greedy[:6]
    assert facts["text"] == text_of(model, prompt.greedy[:6])
    assert facts["stop_reason"] == "length"
    assert facts["options"]["max_tokens"] == 6
    assert facts["options"]["temperature"] == 0.0
    assert facts["plan"]["budget_bytes"] == 10**9
    times = facts["time"]
    assert len(times["steps_s"]) == 6
    assert times["prefill_s"] == times["steps_s"][0]
    assert times["decode_s"] == pytest.approx(sum(times["steps_s"][1:]))
    assert times["seconds_per_token"] == pytest.approx(times["decode_s"] / 5)
    assert times["tokens_per_s"] == pytest.approx(5 / times["decode_s"])
    assert 10**7 < facts["memory"]["peak_rss_bytes"] <= 10**9


def test_json_and_logits_go_to_files(
    run_k3rs: RunK3rs,
    model: k3rs.Model,
    model_path: Path,
    prompts: list[Prompt],
    tmp_path: Path,
) -> None:
    prompt = prompts[-1]
    done = run_k3rs(
        "generate", model_path, "--ids", joined(prompt.ids), "-n", 3, "--ignore-stop",
        "--json", "run.json", "--logits", "logits.npy",
    )  # fmt: skip
    assert done.status == 0
    assert done.stdout == text_of(model, prompt.greedy[:3]) + "\n"
    run = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert run["generated_ids"] == prompt.greedy[:3]
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float32
    expected: list[Any] = []
    list(model.generate(prompt.ids, max_tokens=3, stop_ids=(), on_logits=expected.append))
    assert np.array_equal(logits, np.stack(expected))
    assert file_names(tmp_path) == ["logits.npy", "run.json"]


@pytest.mark.parametrize(
    "options",
    [
        ["--no-incremental"],
        ["--prefill-chunk", "3"],
        ["--backend", "scalar", "--threads", "2"],
        ["--preset", "pocket"],
        ["--trunk-gb", "0.5", "--cache-gb", "0.1"],
        ["--temperature", "0", "--top-k", "4", "--seed", "9"],
        ["--top-k", "1"],
        ["--top-p", "0"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_change_the_tokens(
    run_k3rs: RunK3rs, model_path: Path, prompts: list[Prompt], options: list[str]
) -> None:
    prompt = prompts[-1]
    done = run_k3rs(
        "generate", *options, model_path, "--ids", joined(prompt.ids), "-n", 4, "--ignore-stop",
        "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert done.facts["generated_ids"] == prompt.greedy[:4]


def test_a_seed_decides_the_tokens_and_is_reported(run_k3rs: RunK3rs, model_path: Path) -> None:
    def sample(*options: str) -> dict[str, Any]:
        done = run_k3rs(
            "generate", model_path, "--ids", "1,2", "-n", 8, "--ignore-stop", "--json", "-",
            "--temperature", "3", *options,
        )  # fmt: skip
        return done.facts

    unseeded = sample()
    again = sample("--seed", str(unseeded["options"]["seed"]))
    assert again["generated_ids"] == unseeded["generated_ids"]
    other = sample("--seed", str(unseeded["options"]["seed"] + 1))
    assert other["generated_ids"] != unseeded["generated_ids"]


def test_a_prompt_file_is_taken_as_it_is_but_for_the_mark(
    run_k3rs: RunK3rs, model_path: Path, model: k3rs.Model, tmp_path: Path
) -> None:
    def prompt_ids(data: bytes) -> Any:
        (tmp_path / "prompt.txt").write_bytes(data)
        done = run_k3rs(
            "generate", model_path, "--prompt-file", "prompt.txt", "-n", 1, "--json", "-"
        )
        return done.facts["prompt_ids"]

    assert model.tokenizer is not None
    assert prompt_ids(b"the fox ") == model.tokenizer.encode("the fox ")
    assert prompt_ids(b"\xef\xbb\xbfthe fox") == model.tokenizer.encode("the fox")


def test_line_ends_of_a_prompt_file_are_kept(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    vocabulary = Path(__file__).parents[2] / "fixtures" / "vocabulary"
    tokenizer = k3rs.Tokenizer.from_directory(vocabulary)
    assert tokenizer.encode("a\r\nb") != tokenizer.encode("a\nb")
    (tmp_path / "prompt.txt").write_bytes(b"a\r\nb")
    done = run_k3rs("generate", model_path, "--prompt-file", "prompt.txt", "-n", 1)
    # The small vocabulary of the fixture has no token for a carriage return.
    assert done.status == 2
    assert "byte 0x0D" in done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "prompt.txt: expected a prompt, found empty text"),
        (b"\xef\xbb\xbf", "prompt.txt: expected a prompt, found empty text"),
        (b"ab\xffcd", "prompt.txt: expected UTF-8 text, found byte 0xff at offset 2"),
        (b"\xef\xbb\xbfab\xc3", "prompt.txt: expected UTF-8 text, found byte 0xc3 at offset 5"),
    ],
)
def test_unusable_prompt_files_are_wrong_usage(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "prompt.txt").write_bytes(data)
    done = run_k3rs("generate", model_path, "--prompt-file", "prompt.txt")
    assert done.status == 2
    assert done.stderr.startswith(f"error: {message}\nhint: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bogus"], "invalid choice: 'bogus'"),
        (["generate"], "one of the arguments --prompt --prompt-file --ids is required"),
        (["generate", "--ids", "1", "--prompt", "a"], "not allowed with argument --ids"),
        (["generate", "--ids", "1", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["generate", "--ids", ""], "--ids: expected a whole number at place 1, found ``"),
        (["generate", "--ids", "1,,2"], "--ids: expected a whole number at place 2, found ``"),
        (["generate", "--ids", "1,x"], "--ids: expected a whole number at place 2, found `x`"),
        (["generate", "--ids", "1,-4"], "ids[1]: expected an id of the vocabulary of 2304"),
        (["generate", "--ids=-4"], "ids[0]: expected an id of the vocabulary of 2304, found -4"),
        (["generate", "--ids", "2304"], "ids[0]: expected an id of the vocabulary of 2304"),
        (["generate", "--prompt", ""], "--prompt: expected a prompt, found empty text"),
        (["generate", "--ids", "1", "-n", "0"], "expected a whole number of at least 1"),
        (["generate", "--ids", "1", "--threads", "two"], "expected a whole number"),
        (["generate", "--ids", "1", "--memory", "8"], "expected a size in bytes, found `8`"),
        (["generate", "--ids", "1", "--preset", "palmtop"], "found `palmtop`"),
        (["generate", "--ids", "1", "--trunk-gb", "1GB"], "expected a number of gigabytes"),
        (
            ["generate", "--ids", "1", "--memory", "8GB", "--preset", "laptop"],
            "expected one memory budget, found several",
        ),
        (["generate", "--ids", "1", "--temperature", "-1"], "expected temperature to be"),
        (["generate", "--ids", "1", "--temperature", "nan"], "expected temperature to be"),
        (["generate", "--ids", "1", "--top-p", "1.0001"], "expected top_p to be"),
        (["generate", "--ids", "1", "--quiet", "--verbose"], "not allowed with argument --quiet"),
        (["inspect"], "the following arguments are required: MODEL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_status_2_with_a_hint(
    run_k3rs: RunK3rs, arguments: list[str], message: str
) -> None:
    done = run_k3rs(*arguments)
    assert done.status == 2
    assert done.stdout == ""
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


def test_a_prompt_that_is_not_text_is_wrong_usage(tmp_path: Path, model_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k3rs", "generate", os.fsencode(model_path), "--prompt", b"a\xff"],
        cwd=tmp_path,
        env=command_environment(PYTHONUTF8="1"),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: expected text, found half a surrogate pair")


def test_missing_files_are_failures(run_k3rs: RunK3rs, model_path: Path, tmp_path: Path) -> None:
    for arguments in (
        ["generate", tmp_path / "absent", "--ids", "1"],
        ["generate", tmp_path, "--ids", "1"],
        ["generate", model_path, "--prompt-file", tmp_path / "absent"],
        ["generate", model_path, "--ids", "1", "--json", tmp_path / "absent" / "run.json"],
        ["inspect", tmp_path / "absent"],
        ["plan", tmp_path / "absent"],
    ):
        done = run_k3rs(*arguments)
        assert done.status == 1, arguments
        assert done.stderr.startswith("error: ")
        assert "absent" in done.stderr or "config.json" in done.stderr
        assert "\nhint: " in done.stderr


def test_a_config_that_is_refused_is_status_2(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_path, tmp_path / "model")
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    del config["text_config"]["hidden_size"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = run_k3rs("generate", "model", "--ids", "1")
    assert done.status == 2
    assert "hidden_size" in done.stderr


def test_what_does_not_fit_is_refused_before_loading(run_k3rs: RunK3rs, model_path: Path) -> None:
    done = run_k3rs("generate", model_path, "--ids", "1", "--memory", "1MB")
    assert done.status == 3
    assert done.stdout == ""
    assert "\nhint: " in done.stderr
    plan = run_k3rs("plan", model_path, "--memory", "1MB", "--json")
    assert plan.status == 3
    minimum = plan.facts["minimum_bytes"]
    assert minimum > 10**6
    assert run_k3rs("plan", model_path, "--memory", f"{minimum}B").status == 0
    assert run_k3rs("plan", model_path, "--memory", f"{minimum - 1}B").status == 3


def test_a_numerical_fault_is_status_4_and_no_token(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_path, tmp_path / "model")
    damage_norm(tmp_path / "model")
    done = run_k3rs("generate", "model", "--ids", "1", "-n", 3, "--logits", "logits.npy")
    assert done.status == 4
    assert done.stdout == ""
    assert done.stderr.startswith("error: numerical fault")
    assert file_names(tmp_path) == ["model"]


def damage_norm(directory: Path) -> None:
    """Puts a NaN into the final norm, a vector of bf16."""
    name = "language_model.model.norm.weight"
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    with (directory / index["weight_map"][name]).open("r+b") as shard:
        (header_length,) = struct.unpack("<Q", shard.read(8))
        begin, _ = json.loads(shard.read(header_length))[name]["data_offsets"]
        shard.seek(8 + header_length + begin)
        shard.write(b"\xc0\x7f")


def test_a_closed_pipe_ends_quietly(model_path: Path, tmp_path: Path) -> None:
    for arguments, wanted in (
        (["--help"], b"usage: k3rs"),
        (["generate", str(model_path), "--ids", "1", "-n", "200", "--ignore-stop", "--quiet"], b""),
        (["generate", str(model_path), "--ids", "1", "-n", "64", "--json", "-", "--quiet"], b"{"),
    ):
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "k3rs", *arguments],
            cwd=tmp_path,
            env=command_environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
        )
        os.close(writer)
        assert os.read(reader, 5)[: len(wanted)] == wanted[:5]
        os.close(reader)
        _, stderr = process.communicate(timeout=TIME_LIMIT_S)
        assert (process.returncode, stderr) == (0, b"")


def test_a_full_disk_is_an_error_and_not_a_traceback(model_path: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "k3rs", "generate", str(model_path), "--ids", "1", "--quiet"],
            cwd=tmp_path,
            env=command_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: cannot use the output: No space left on device\nhint: ")


def test_the_status_survives_a_closed_or_full_error_stream(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    streams = [writer]
    if Path("/dev/full").exists():
        streams.append(os.open("/dev/full", os.O_WRONLY))
    for stream in streams:
        done = subprocess.run(
            [sys.executable, "-m", "k3rs", "bogus"],
            cwd=tmp_path,
            env=command_environment(),
            stdout=subprocess.PIPE,
            stderr=stream,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        os.close(stream)
        assert (done.returncode, done.stdout) == (2, b"")


def test_ctrl_c_prints_and_writes_what_was_generated(
    model: k3rs.Model, model_path: Path, tmp_path: Path
) -> None:
    done = interrupt_generation(
        tmp_path, model_path, "--ids", "1", "-n", "100000", "--json", "run.json"
    )
    assert done.status == 130
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("error: interrupted\n")
    run = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert run["stop_reason"] == "interrupted"
    # The signal can fall between taking the last token and printing it.
    printed = text_of(model, run["generated_ids"][:-1])
    assert done.stdout.startswith(printed)


def test_an_answer_in_a_narrow_encoding_does_not_fail(run_k3rs: RunK3rs, model_path: Path) -> None:
    done = run_k3rs(
        "generate", model_path, "--ids", "1", "-n", 4, "--ignore-stop", PYTHONIOENCODING="ascii"
    )
    assert done.status == 0
    assert done.stdout.isascii()


def test_without_a_terminal_there_are_no_control_characters(
    run_k3rs: RunK3rs, model_path: Path
) -> None:
    done = run_k3rs("generate", model_path, "--ids", "1", "-n", 2, "--verbose", FORCE_COLOR="1")
    assert done.status == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "config keys without effect: " in done.stderr


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["score"], ["plan"], ["inspect"], ["presets"]], ids=str
)
def test_every_command_has_help(run_k3rs: RunK3rs, command: list[str]) -> None:
    done = run_k3rs(*command, "--help")
    assert done.status == 0
    assert done.stdout.startswith(f"usage: {' '.join(['k3rs', *command])} ")
    assert done.stderr == ""


def test_version(run_k3rs: RunK3rs) -> None:
    assert run_k3rs("--version").stdout == f"k3rs {k3rs.__version__}\n"


def test_the_installed_program_is_the_module(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("k3rs")
    if not program.exists():
        pytest.skip("k3rs is importable but not installed as a program here")
    done = subprocess.run(
        [program, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"k3rs {k3rs.__version__}\n"
