"""How well a model predicts a text: the value, and that no way of computing it changes a bit."""

import base64
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_edit import edited_tensor
from harness import TIME_LIMIT_S, RunK3rs, command_environment, smallest_budget

import k3rs
from k3rs.exceptions import InputError
from k3rs.vocabulary import CONFIG_FILE, RANKS_FILE, SPECIAL_SLOT_COUNT

# More than 128 tokens, which one sweep reads; `<|open|>` and `[EOS]` would be special in markup.
TEXT = "the quick fox said: <|open|> and the other one said nothing.\n" * 4 + "the end"
NOTICED_WITHIN_S = 3.0


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


def ids_of(model: k3rs.Model, text: str) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode(text)


def expected_score(model: k3rs.Model, text: str) -> k3rs.Score:
    """The definition, computed from the logits of the whole text at once."""
    assert model.tokenizer is not None
    ids = ids_of(model, text)
    logits = model.session().forward(ids, all_positions=True).astype(np.float64)[:-1]
    own = logits[np.arange(len(ids) - 1), ids[1:]]
    nll = (np.logaddexp.reduce(logits, axis=1) - own).tolist()
    size_bytes = len(text.encode()) - len(model.tokenizer.token_bytes(ids[0]))
    mean = math.fsum(nll) / len(nll)
    return k3rs.Score(len(nll), mean, math.exp(mean), math.fsum(nll) / math.log(2) / size_bytes)


def test_the_score_is_that_of_the_logits(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, text_file: Path
) -> None:
    expected = expected_score(model, TEXT)
    assert expected.tokens > 128
    assert asdict(k3rs.score(model, TEXT)) == pytest.approx(asdict(expected), rel=1e-12)
    done = run_k3rs("score", model_path, text_file, "--json")
    assert (done.status, done.stderr) == (0, "")
    assert list(done.facts) == ["tokens", "nll", "perplexity", "bits_per_byte"]
    assert done.facts == asdict(k3rs.score(model, TEXT))


def test_what_looks_special_is_text(model: k3rs.Model) -> None:
    assert model.tokenizer is not None
    assert len(model.tokenizer.encode_markup("<|open|>")) == 1
    assert k3rs.score(model, "<|open|>").tokens == 7


def test_two_tokens_are_enough(model: k3rs.Model) -> None:
    assert len(ids_of(model, "ab")) == 2
    score = k3rs.score(model, "ab")
    assert asdict(score) == pytest.approx(asdict(expected_score(model, "ab")), rel=1e-12)
    assert score.tokens == 1


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(
    run_k3rs: RunK3rs, model_path: Path, text_file: Path, tmp_path: Path
) -> None:
    """Its weights are zeros, and so are all its logits."""
    directory = synthesized(tmp_path, model_path)
    for name in (RANKS_FILE, CONFIG_FILE):
        shutil.copy(model_path / name, directory)
    facts = run_k3rs("score", directory, text_file, "--json").facts
    assert facts["nll"] == pytest.approx(math.log(320), rel=1e-12)
    assert facts["perplexity"] == pytest.approx(320, rel=1e-12)


def synthesized(directory: Path, model_path: Path, *, vocab: int | None = None) -> Path:
    """The fixture's model with zeros for weights, and without a tokenizer."""
    config = model_path / "config.json"
    k3rs.synthesize(directory / "zeros", config=config, vocab=vocab, sparse=True)
    return directory / "zeros"


def test_a_person_gets_the_same_numbers_as_a_program(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, text_file: Path
) -> None:
    score = k3rs.score(model, TEXT)
    done = run_k3rs("score", model_path, text_file)
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"tokens         {score.tokens}",
        f"nll            {score.nll:.6f} nats per token",
        f"perplexity     {score.perplexity:,.4f}",
        f"bits per byte  {score.bits_per_byte:.6f}",
    ]


# No way of computing changes a bit


def test_chunks_threads_and_memory_do_not_change_a_bit(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, text_file: Path
) -> None:
    positions = len(ids_of(model, TEXT)) - 1
    smallest = f"{smallest_budget(model_path, positions, threads=1)}B"
    plain = run_k3rs("score", model_path, text_file, "--json")
    assert plain.status == 0
    for options in (
        ["--prefill-chunk", "1"],
        ["--prefill-chunk", "7"],
        ["--prefill-chunk", "64"],
        ["--prefill-chunk", "1000"],
        ["--memory", smallest, "--threads", "1"],
        ["--threads", "3", "--backend", "scalar"],
    ):
        assert run_k3rs("score", model_path, text_file, "--json", *options) == plain, options


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_pieces_do_not_change_a_bit(model: k3rs.Model, model_path: Path, chunk: int) -> None:
    score = k3rs.score(model, TEXT)
    with k3rs.Model.open(model_path, memory="1GB", threads=1, prefill_chunk=chunk) as other:
        assert other.facts["options"]["prefill_chunk"] == chunk
        for piece in (None, 1, 7, 64, 100_000):
            assert k3rs.score(other, TEXT, piece_tokens=piece) == score, piece


def test_the_logits_of_a_long_text_stay_within_the_budget(tmp_path: Path, model_path: Path) -> None:
    """Those of the whole text at once would take 190 MB, and as much again for their copy."""
    vocabulary, tokens, chunk = 40_000, 1200, 32
    directory = synthesized(tmp_path, model_path, vocab=vocabulary)
    write_pairs_of_bytes(directory, vocabulary - SPECIAL_SLOT_COUNT)
    request = k3rs.MemoryRequest(10**9)
    options: dict[str, Any] = {"positions": tokens, "prefill_chunk": chunk, "threads": 1}
    minimum = k3rs.plan(directory, request, **options)["minimum_bytes"]
    script = (
        "import json, sys, k3rs\n"
        "directory, tokens, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])\n"
        "with k3rs.Model.open(directory, **options) as model:\n"
        "    assert k3rs.score(model, '!' * (tokens + 1)).tokens == tokens\n"
        "    print(model.report()['memory']['peak_rss_bytes'])\n"
    )
    options_json = json.dumps({"memory": minimum, **options})
    done = subprocess.run(
        [sys.executable, "-c", script, directory, str(tokens), options_json],
        env=command_environment(),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert int(done.stdout) <= minimum


def write_pairs_of_bytes(directory: Path, count: int) -> None:
    """A vocabulary of all bytes and then of pairs, none of which begins with `!`."""
    singles = [bytes([byte]) for byte in range(256)]
    pairs = [bytes([first, second]) for first in range(64, 256) for second in range(256)]
    ranks = (
        b"%s %d\n" % (base64.b64encode(token), rank)
        for rank, token in enumerate([*singles, *pairs][:count])
    )
    (directory / RANKS_FILE).write_bytes(b"".join(ranks))
    named = {"added_tokens_decoder": {str(count + 3): {"content": "<|open|>"}}}
    (directory / CONFIG_FILE).write_text(json.dumps(named), encoding="utf-8")


# Arguments and files


def test_without_a_model_the_shipped_one_scores(run_k3rs: RunK3rs, text_file: Path) -> None:
    named = run_k3rs("score", k3rs.shipped_model(), text_file, "--json")
    unnamed = run_k3rs("score", text_file, "--json")
    assert (named.status, unnamed.status) == (0, 0)
    assert unnamed.stdout == named.stdout
    assert unnamed.stderr == ""


def test_a_byte_order_mark_is_no_text_but_line_ends_are(
    run_k3rs: RunK3rs, model: k3rs.Model, model_path: Path, tmp_path: Path
) -> None:
    # The fixture's vocabulary has no carriage return, so that a new line has to do.
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf\nthe fox\n\n")
    facts = run_k3rs("score", model_path, "marked.txt", "--json").facts
    assert facts == asdict(k3rs.score(model, "\nthe fox\n\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text.txt: expected a text of at least 2 tokens, found 0"),
        (b"a", "text.txt: expected a text of at least 2 tokens, found 1"),
        (b"the \xff", "text.txt: expected UTF-8 text, found byte 0xff at offset 4"),
        (b"the fox\r\n", "found byte 0x0D, which has no token"),
    ],
)
def test_a_text_that_cannot_be_scored_is_status_2_with_a_hint(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    done = run_k3rs("score", model_path, "text.txt", "--json")
    assert (done.status, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert message in error
    assert hint.startswith("hint: ")


def test_a_file_that_cannot_be_read_is_a_failure(
    run_k3rs: RunK3rs, model_path: Path, text_file: Path, tmp_path: Path
) -> None:
    for arguments, found in (
        ([model_path, "absent.txt"], "`absent.txt`: No such file"),
        ([model_path, tmp_path], f"`{tmp_path}`: Is a directory"),
        ([tmp_path / "absent", text_file], "expected a model directory, found nothing there"),
    ):
        done = run_k3rs("score", *arguments)
        assert (done.status, done.stdout) == (1, ""), arguments
        assert found in done.stderr
        assert "\nhint: " in done.stderr


def test_wrong_usage_and_a_small_budget(
    run_k3rs: RunK3rs, model_path: Path, text_file: Path
) -> None:
    for arguments, status, message in (
        ([], 2, "the following arguments are required: TEXT_FILE"),
        ([model_path, text_file, "--prefill-chunk", "0"], 2, "a whole number of at least 1"),
        ([model_path, text_file, "--memory", "1GB", "--preset", "laptop"], 2, "found several"),
        ([model_path, text_file, "--memory", "1MB"], 3, "is too small"),
    ):
        done = run_k3rs("score", *arguments)
        assert (done.status, done.stdout) == (status, ""), arguments
        assert message in done.stderr
        assert "\nhint: " in done.stderr


def test_without_a_tokenizer_there_is_no_score(
    run_k3rs: RunK3rs, without_tokenizer: Path, text_file: Path
) -> None:
    done = run_k3rs("score", without_tokenizer, text_file)
    assert (done.status, done.stdout) == (2, "")
    assert "expected a tokenizer for a text to score, found no tiktoken.model" in done.stderr
    assert "\nhint: add the vocabulary files" in done.stderr
    with (
        k3rs.Model.open(without_tokenizer, memory="1GB", threads=1) as model,
        pytest.raises(InputError, match="expected a tokenizer") as refused,
    ):
        k3rs.score(model, TEXT)
    assert refused.value.hint


def test_wrong_arguments_of_the_function(model: k3rs.Model) -> None:
    for text, piece, message in (
        ("a", None, "text: expected a text of at least 2 tokens, found 1"),
        (TEXT, 0, "expected piece_tokens to be at least 1, found 0"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            k3rs.score(model, text, piece_tokens=piece)
        assert refused.value.hint


# Numbers out of range


LM_HEAD = "language_model.lm_head.weight"


def test_nan_is_status_4_and_no_score(run_k3rs: RunK3rs, copied: Path, text_file: Path) -> None:
    with edited_tensor(copied, LM_HEAD) as tensor:
        tensor.put(0, math.nan)
    done = run_k3rs("score", copied, text_file, "--json")
    assert (done.status, done.stdout) == (4, "")
    assert done.stderr.startswith("error: numerical fault")
    assert LM_HEAD in done.stderr


def test_a_perplexity_beyond_float64_is_null(
    run_k3rs: RunK3rs, copied: Path, text_file: Path
) -> None:
    """A reserved token, which no text has, is taken for sure at some places."""
    with edited_tensor(copied, LM_HEAD) as tensor:
        tensor.put(300 * tensor.shape[1], 1e20)
    facts = run_k3rs("score", copied, text_file, "--json").facts
    assert facts["nll"] > 1e15
    assert facts["bits_per_byte"] > 1e15
    assert facts["perplexity"] is None
    assert "perplexity     inf\n" in run_k3rs("score", copied, text_file).stdout


# Progress and Ctrl-C


def test_progress_counts_the_tokens_of_the_text(model: k3rs.Model) -> None:
    seen: list[tuple[int, int]] = []
    score = k3rs.score(
        model, TEXT, piece_tokens=50, progress=lambda done, tokens: seen.append((done, tokens))
    )
    done = [tokens for tokens, _ in seen]
    assert done == sorted(done)
    assert {50, 100, 150, score.tokens} <= set(done)
    assert {tokens for _, tokens in seen} == {score.tokens}


def test_ctrl_c_stops_what_a_terminal_shows_the_progress_of(
    model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("the fox " * 50_000, encoding="utf-8")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rs", "score", str(model_path), "long.txt", "--threads", "1"],
        cwd=tmp_path,
        env=command_environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    limit = threading.Timer(TIME_LIMIT_S, process.kill)
    limit.start()
    shown = b""
    while not re.search(rb"scoring .*[1-9]%", shown):
        shown += os.read(ours, 1 << 16)
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    # A terminal says by an error that nobody writes to it any more.
    with suppress(OSError):
        while True:
            shown += os.read(ours, 1 << 16)
    assert time.monotonic() - sent_at < NOTICED_WITHIN_S
    stdout, _ = process.communicate(timeout=TIME_LIMIT_S)
    limit.cancel()
    os.close(ours)
    assert (process.returncode, stdout) == (130, b"")
    assert shown.endswith(b"error: interrupted\r\n")
