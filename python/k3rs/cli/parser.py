"""The arguments of every command, apart from what the commands do."""

import argparse
from typing import Any, NoReturn, TypeAlias

from k3rs._k3rs import __version__
from k3rs.cli.options import (
    add_budget,
    add_compute,
    add_json_switch,
    add_layers,
    add_output,
    add_place,
    add_probe,
    add_processor,
    add_quiet_switch,
    add_sampling,
    add_state,
    add_weights,
    count,
    count_or_none,
    counts,
)
from k3rs.exceptions import InputError

__all__ = ["build_parser"]

_MODEL_HELP = "directory with config.json and *.safetensors"
_SHIPPED_HELP = f"{_MODEL_HELP} (default: the model that ships with k3rs)"


_Commands: TypeAlias = "argparse._SubParsersAction[Any]"


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as an exception, so that it is printed like any other error."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message, hint=f"`{self.prog} --help` lists the arguments")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` is the module that runs it."""
    parser = _Parser(
        prog="k3rs",
        description="Kimi K3 on one ordinary computer: exact output at any memory budget.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"k3rs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_score(commands)
    _add_plan(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    _add_presets(commands)
    _add_bench(commands)
    _add_trace(commands)
    _add_synth(commands)
    _add_pack(commands)
    _add_download(commands)
    _add_verify(commands)
    return parser


def _add_command(commands: _Commands, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    return parser


def _add_generate(commands: _Commands) -> None:
    parser = _add_command(commands, "generate", "continue a prompt")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    group = parser.add_argument_group("prompt (one of, or none with --load-state)")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text, in which nothing is special")
    prompt.add_argument(
        "--prompt-file",
        metavar="PATH",
        help="UTF-8 text, taken as it is except for a byte order mark",
    )
    prompt.add_argument("--ids", metavar="1,2,3", help="token ids")
    parser.add_argument(
        "-n",
        "--max-tokens",
        metavar="N",
        type=count,
        default=16,
        help="tokens to generate (default: 16)",
    )
    add_budget(parser)
    add_weights(parser)
    add_compute(parser).add_argument(
        "--no-incremental",
        action="store_true",
        help="recompute the whole prefix each step, for checking",
    )
    sampling = add_sampling(
        parser, "choosing tokens (greedy unless one of the first five is given)"
    )
    sampling.add_argument(
        "--ignore-stop", action="store_true", help="do not stop at the model's end tokens"
    )
    sampling.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text, which is not shown; may be given several times",
    )
    add_state(parser)
    add_output(parser)


def _add_chat(commands: _Commands) -> None:
    parser = _add_command(commands, "chat", "talk to a model")
    parser.epilog = (
        "Messages are read from the terminal, or line by line from standard input. Unless a way "
        "of choosing tokens is given, the temperature is 1 and --top-p 0.95, as the model's "
        "makers recommend. The first Ctrl-C breaks off what is going on, the next one leaves."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the system says first")
    group.add_argument(
        "--think",
        choices=("off", "low", "high", "max"),
        help="how much the model thinks before it answers (default: max, or as it was saved)",
    )
    group.add_argument("--fold", action="store_true", help="do not show what it thinks")
    group.add_argument(
        "--context",
        metavar="N",
        type=count,
        default=8192,
        help="ids that memory is planned for: all messages, replies and reasoning together "
        "(default: 8192)",
    )
    group.add_argument(
        "-n",
        "--max-tokens",
        metavar="N",
        type=count,
        help="tokens of a reply (default: until it ends, or the context is used up)",
    )
    add_state(parser)
    add_budget(parser)
    add_weights(parser)
    add_compute(parser)
    add_sampling(parser, "choosing tokens")
    add_quiet_switch(parser)


def _add_score(commands: _Commands) -> None:
    parser = _add_command(commands, "score", "measure how well a model predicts a text")
    parser.epilog = (
        "Plain text, in which nothing is special, is encoded without a start token. Every token "
        "but the first is predicted from all before it, by a softmax over the whole vocabulary. "
        "tokens: how many are predicted; nll: their mean negative log-likelihood in nats; "
        "perplexity: exp(nll), null in JSON where that is beyond float64; bits_per_byte: their "
        "negative log-likelihood in bits, by the bytes that they stand for."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    parser.add_argument(
        "text_file",
        metavar="TEXT_FILE",
        help="UTF-8 text, taken as it is except for a byte order mark",
    )
    add_budget(parser)
    add_weights(parser)
    add_compute(parser)
    add_json_switch(parser)


def _add_plan(commands: _Commands) -> None:
    parser = _add_command(commands, "plan", "show how a memory budget would be divided")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    add_budget(parser)
    parser.add_argument(
        "-n",
        "--max-tokens",
        metavar="N",
        type=count,
        default=16,
        help="tokens to generate (default: 16)",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=count,
        default=4080,
        help="tokens of the prompt (default: 4080)",
    )
    add_layers(parser)
    add_processor(parser)
    add_json_switch(parser)


def _add_inspect(commands: _Commands) -> None:
    parser = _add_command(commands, "inspect", "show what a checkpoint contains")
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    add_json_switch(parser)


def _add_doctor(commands: _Commands) -> None:
    parser = _add_command(
        commands, "doctor", "say what this machine can run, how fast, and what to type next"
    )
    parser.epilog = (
        "With MODEL its own files are read, and nothing is written there. Without one, a temporary "
        "file in DIR tells whether the released model could be run from there. The status is 1 if "
        "a check fails, which means that MODEL or k3rs cannot be used; warnings leave it at 0."
    )
    add_place(parser, _MODEL_HELP)
    add_probe(parser)
    add_json_switch(parser)


def _add_presets(commands: _Commands) -> None:
    parser = _add_command(commands, "presets", "list the named memory budgets")
    add_json_switch(parser)


def _add_synth(commands: _Commands) -> None:
    parser = _add_command(
        commands, "synth", "write a checkpoint of the released layout without the released weights"
    )
    parser.add_argument("directory", metavar="DIR", help="a new or an empty directory")
    parser.add_argument(
        "--config", metavar="CONFIG_JSON", help="config of the model (default: the released one)"
    )
    parser.add_argument("--layers", metavar="N", type=count, help="keep the first N layers")
    parser.add_argument("--experts", metavar="N", type=count, help="routed experts of a layer")
    parser.add_argument("--vocab", metavar="N", type=count, help="token ids, at least 320")
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="leave the data as holes, which read as zeros and take no room (default: random "
        "weights)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="the same seed gives the same weights (default: 0)",
    )
    add_json_switch(parser)


def _add_pack(commands: _Commands) -> None:
    parser = _add_command(
        commands, "pack", "copy the trunk of a model, in the order of use, for a faster disk"
    )
    parser.epilog = (
        "The trunk (108.8 GB at the released size) is read for every token; `--trunk TRUNK_DIR` "
        "then takes it from there. No bit of the output depends on it. A pack that was "
        "interrupted goes on where it stopped."
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("directory", metavar="TRUNK_DIR", help="where the trunk is written")
    parser.add_argument(
        "--check", action="store_true", help="compare a finished trunk with the model"
    )
    add_json_switch(parser)


def _add_trace(commands: _Commands) -> None:
    actions = _add_command(
        commands, "trace", "work with the expert requests that `generate --trace` wrote"
    ).add_subparsers(dest="action", metavar="ACTION", required=True)
    parser = _add_command(actions, "replay", "show what caches of other sizes would have hit")
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="what --trace wrote, or by the ending .u16 little-endian pairs (layer, expert)",
    )
    parser.add_argument(
        "--slots",
        metavar="N,N,...",
        type=counts,
        help="experts in the cache (default: from an eighth to four times those of a token)",
    )
    parser.add_argument(
        "--skip",
        metavar="TOKENS",
        type=count_or_none,
        default=0,
        help="tokens that fill the cache but are not counted (default: 0)",
    )
    add_json_switch(parser)


def _add_bench(commands: _Commands) -> None:
    parser = _add_command(
        commands, "bench", "measure what this machine can do, and the kernels beside it"
    )
    add_place(parser, _MODEL_HELP)
    add_processor(parser)
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything runs; the figures are bad"
    )
    add_json_switch(parser)


def _add_download(commands: _Commands) -> None:
    parser = _add_command(
        commands, "download", "fetch a model from the Hugging Face Hub, checked and resumable"
    )
    parser.epilog = (
        "The same command continues after any end, at the commit at which the directory was begun; "
        "DIR/k3rs-manifest.json keeps it, and `k3rs verify DIR` compares with it. The token is "
        "that in HF_TOKEN or of `hf auth login`. --only-layers takes whole shards, those that have "
        "a tensor of these layers or the embedding, and all files that are not weights."
    )
    parser.add_argument(
        "repo",
        metavar="REPO",
        nargs="?",
        help="repository, OWNER/NAME (default: moonshotai/Kimi-K3)",
    )
    parser.add_argument("directory", metavar="DIR", help="where the files go")
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit (default: the newest)"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--only-layers", metavar="A-B", help="of the weights only those of these layers"
    )
    part.add_argument("--no-weights", action="store_true", help="all but *.safetensors")
    parser.add_argument(
        "--retries",
        metavar="N",
        type=count_or_none,
        default=10,
        help="try again N times in a row without success, after growing waits (default: 10, which "
        "takes three minutes)",
    )
    add_json_switch(parser)
    add_quiet_switch(parser)


def _add_verify(commands: _Commands) -> None:
    parser = _add_command(
        commands, "verify", "compare the files of a model with what was published"
    )
    parser.epilog = (
        "Without a list only the sizes of the released shards can be compared. Nothing is written "
        "into MODEL. Interrupted, the same command continues for a day. The status is 1 if any "
        "file is missing or wrong."
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    source = parser.add_argument_group(
        "what to compare with (default: MODEL/k3rs-manifest.json)"
    ).add_mutually_exclusive_group()
    source.add_argument("--manifest", metavar="FILE", help="a manifest")
    source.add_argument("--repo", metavar="REPO", help="what the hub lists of this repository")
    source.add_argument(
        "--write-manifest",
        metavar="FILE",
        help="nothing: write a manifest of the files as they are, for later",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of --repo")
    parser.add_argument(
        "--again",
        action="store_true",
        help="hash everything, also what an interrupted check has hashed within the last day",
    )
    add_json_switch(parser)
    add_quiet_switch(parser)
