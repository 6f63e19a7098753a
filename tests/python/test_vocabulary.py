"""Vocabulary files: what is read, what is refused, and with which words."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3rs.exceptions import CheckpointError, ConfigError
from k3rs.vocabulary import CONFIG_FILE, RANKS_FILE, read_vocabulary

ROOT = Path(__file__).parents[2]
TOKENS = [b"a", b"b", b"ab", b"\xff"]
NAMED = {"4": {"content": "[BOS]", "special": True}, "7": {"content": "<|open|>"}}


def ranks_of(tokens: list[bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))


def config_of(added: Any) -> bytes:
    return json.dumps({"added_tokens_decoder": added}).encode()


def write(
    directory: Path, ranks: bytes = ranks_of(TOKENS), config: bytes = config_of(NAMED)
) -> Path:
    (directory / RANKS_FILE).write_bytes(ranks)
    (directory / CONFIG_FILE).write_bytes(config)
    return directory


def test_a_whole_vocabulary(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(write(tmp_path))
    assert vocabulary.ordinary == TOKENS
    assert len(vocabulary.special) == 256
    assert vocabulary.special[:4] == [
        "[BOS]",
        "<|reserved_token_5|>",
        "<|reserved_token_6|>",
        "<|open|>",
    ]
    assert vocabulary.special[255] == "<|reserved_token_259|>"


def test_lines_may_come_in_any_order(tmp_path: Path) -> None:
    lines = ranks_of(TOKENS).splitlines(keepends=True)
    assert read_vocabulary(write(tmp_path, b"".join(reversed(lines)))).ordinary == TOKENS


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (b"", "expected lines of `base64 rank`, found an empty file"),
        (b"YQ== 0\nYg==\n", "line 2: expected `base64 rank`, found b'Yg=='"),
        (b"YQ== 0\n\nYg== 1\n", "line 2: expected `base64 rank`, found b''"),
        (b"YQ== 0\n 1\n", "line 2: expected `base64 rank`, found b' 1'"),
        (b"YQ== 0\nYg== 1 \n", "line 2: expected `base64 rank`, found b'Yg== 1 '"),
        (b"YQ== 0\nYg== -1\n", "line 2: expected `base64 rank`, found b'Yg== -1'"),
        (b"YQ== 0\nYg== 1_0\n", "line 2: expected `base64 rank`, found b'Yg== 1_0'"),
        (b"YQ== " + b"9" * 5000, "line 1: expected `base64 rank`, found"),
        (b"YQ== 0\nY!g= 1\n", "line 2: expected base64, found b'Y!g='"),
        (b"YQ== 0\nYg= 1\n", "line 2: expected base64, found b'Yg='"),
        (b"YQ== 0\nYh== 1\n", "line 2: expected canonical base64, found b'Yh=='"),
        (b"YQ== 0\nYg== 0\n", "line 2: expected each rank once, found rank 0 of line 1 again"),
        (b"YQ== 0\nYQ== 1\n", "line 2: expected each token once, found the token of line 1 again"),
        (
            b"YQ== 0\nYg== 2\n",
            "line 2: expected a rank below 2, the number of lines, found rank 2",
        ),
    ],
)
def test_malformed_ranks(tmp_path: Path, ranks: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_vocabulary(write(tmp_path, ranks))
    assert f"`{tmp_path / RANKS_FILE}`" in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b'{"a": "x",\n"b": "\xff"}', "line 2: expected UTF-8, found byte 0xFF"),
        (b'{"a": 1,\n\n"b" 2}', "line 3: expected JSON, found Expecting ':' delimiter"),
        (b"[" * 100_000, "expected JSON, found"),
        (b'{"a": 1, "a": 2}', "expected JSON, found key `a` twice in one object"),
        (b"[1]", "expected a JSON object, found list"),
        (b"{}", "expected an object `added_tokens_decoder`, found nothing"),
        (config_of([]), "expected an object `added_tokens_decoder`, found list"),
        (config_of({"x": {}}), "expected ids as keys of `added_tokens_decoder`"),
        (config_of({"²": {}}), "expected ids as keys of `added_tokens_decoder`"),
        (config_of({"3": {"content": "[BOS]"}}), "expected special ids in 4..259"),
        (config_of({"260": {"content": "[BOS]"}}), "expected special ids in 4..259"),
        (config_of({"4": {}}), 'text in `content` of `added_tokens_decoder["4"]`, found None'),
        (config_of({"4": "x"}), "expected text in `content`"),
        (config_of({"4": {"content": ""}}), "expected text in `content`"),
        (config_of({"4": {"content": "\ud800"}}), "expected text in `content`"),
        (config_of({"4": {"content": "x"}, "9": {"content": "x"}}), "found 'x' for 4 and 9"),
        (config_of({"4": {"content": "<|reserved_token_5|>"}}), "for 4 and 5"),
    ],
)
def test_malformed_config(tmp_path: Path, config: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_vocabulary(write(tmp_path, config=config))
    assert f"`{tmp_path / CONFIG_FILE}`" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [RANKS_FILE, CONFIG_FILE])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}`: expected a readable file, found: No such"):
        read_vocabulary(tmp_path)


def test_a_kimi_k2_vocabulary_is_refused(tmp_path: Path) -> None:
    config = config_of({"7": {"content": "<|im_user|>"}})
    with pytest.raises(ConfigError, match=r"token 7 to be `<\|open\|>`, found `<\|im_user\|>`"):
        read_vocabulary(write(tmp_path, config=config))


def test_the_fixtures_are_what_the_tool_makes(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "make_vocabulary.py"
    subprocess.run([sys.executable, tool, "--output", tmp_path], check=True)
    for directory in ("vocabulary", "tiny_k3/model"):
        for name in (RANKS_FILE, CONFIG_FILE):
            made = (tmp_path / directory / name).read_bytes()
            assert made == (ROOT / "fixtures" / directory / name).read_bytes(), name
