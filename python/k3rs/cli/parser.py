"""The arguments of every command, apart from what the commands do."""

import argparse
from typing import Any, NoReturn, TypeAlias

from k3rs._k3rs import __version__
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
    _add_presets(commands)
    _add_bench(commands)
    _add_trace(commands)
    _add_synth(commands)
    _add_pack(commands)
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
        type=_count,
        default=16,
        help="tokens to generate (default: 16)",
    )
    _add_budget(parser)
    _add_weights(parser)
    _add_compute(parser).add_argument(
        "--no-incremental",
        action="store_true",
        help="recompute the whole prefix each step, for checking",
    )
    sampling = _add_sampling(
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
    _add_state(parser)
    _add_output(parser)


def _add_chat(commands: _Commands) -> None:
    parser = _add_command(commands, "chat", "talk to a model")
    parser.epilog = (
        "Messages are read from the terminal, or line by line from standard input. Unless a way "
        "of choosing tokens is given, the temperature is 1 and --top-p 0.95, as the model's "
        "makers recommend. The first Ctrl-C breaks a reply off, the next one leaves."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the system says first")
    group.add_argument(
        "--think",
        choices=("off", "low", "high", "max"),
        default="max",
        help="how much the model thinks before it answers (default: max)",
    )
    group.add_argument("--fold", action="store_true", help="do not show what it thinks")
    group.add_argument(
        "--context",
        metavar="N",
        type=_count,
        default=8192,
        help="ids that memory is planned for: all messages, replies and reasoning together "
        "(default: 8192)",
    )
    group.add_argument(
        "-n",
        "--max-tokens",
        metavar="N",
        type=_count,
        help="tokens of a reply (default: until it ends, or the context is used up)",
    )
    _add_state(parser)
    _add_budget(parser)
    _add_weights(parser)
    _add_compute(parser)
    _add_sampling(parser, "choosing tokens")
    _add_quiet_switch(parser)


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
    _add_budget(parser)
    _add_weights(parser)
    _add_compute(parser)
    _add_json_switch(parser)


def _add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory (a size, a preset, or the two shares)")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        default="auto",
        help="bound of everything that the process keeps in memory: 8GB, 7.5GiB, 512MB, "
        "or auto (default)",
    )
    group.add_argument("--preset", metavar="NAME", help="a named budget; see `k3rs presets`")
    group.add_argument("--trunk-gb", metavar="X", help="GB (10^9 bytes) of resident trunk")
    group.add_argument("--cache-gb", metavar="Y", help="GB (10^9 bytes) of cached experts")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trunk", metavar="DIR", help="stream the trunk from there; `k3rs pack` made it"
    )
    _add_layers(parser)


def _add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers",
        metavar="N",
        type=_count,
        help="only the first N layers, as if there were no others: for study",
    )


def _add_processor(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    group.add_argument(
        "--threads", metavar="N", type=_count, help="compute threads (default: physical cores)"
    )
    group.add_argument(
        "--backend",
        choices=("auto", "avx512", "avx2", "scalar"),
        default="auto",
        help="instruction set (default: the best that the CPU has)",
    )


def _add_compute(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    group = parser.add_argument_group("computing (no bit of the output depends on it)")
    _add_processor(group)
    group.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=_count,
        help="tokens per sweep of the text that is read",
    )
    return group


def _add_sampling(parser: argparse.ArgumentParser, title: str) -> "argparse._ArgumentGroup":
    group = parser.add_argument_group(title)
    group.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        help="divides the logits; 0 is greedy (default: 1 when sampling)",
    )
    group.add_argument(
        "--top-k", metavar="N", type=int, help="keep the N most likely tokens (0: all)"
    )
    group.add_argument(
        "--top-p", metavar="X", type=float, help="then the most likely that reach X together"
    )
    group.add_argument(
        "--min-p", metavar="X", type=float, help="then those above X times the most likely"
    )
    group.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same tokens")
    for name, meaning in (
        ("repetition", "divides positive logits of ids in the text, multiplies negative ones"),
        ("presence", "subtracted from the logits of ids that were generated"),
        ("frequency", "subtracted once for each time that an id was generated"),
    ):
        group.add_argument(f"--{name}-penalty", metavar="X", type=float, help=meaning)
    return group


def _add_state(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a text that goes on")
    group.add_argument(
        "--save-state", metavar="PATH", help="keep the text and the model's memory of it"
    )
    group.add_argument(
        "--load-state", metavar="PATH", help="go on from there; the prompt is put behind it"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        metavar="PATH",
        help='the run as JSON; "-" is stdout, where then no text is printed',
    )
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=_count_or_none,
        help="log-probabilities of each token and of the N most likely",
    )
    group.add_argument(
        "--logits",
        metavar="PATH",
        help="float32 logits of every generated step, .npy [N, vocab]",
    )
    group.add_argument(
        "--trace", metavar="PATH", help="expert requests, token by token, for `k3rs trace replay`"
    )
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("--quiet", action="store_true", help="no notes, progress or report")
    loudness.add_argument(
        "--verbose", action="store_true", help="also the plan and unknown config keys"
    )


def _add_plan(commands: _Commands) -> None:
    parser = _add_command(commands, "plan", "show how a memory budget would be divided")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_SHIPPED_HELP)
    _add_budget(parser)
    parser.add_argument(
        "-n",
        "--max-tokens",
        metavar="N",
        type=_count,
        default=16,
        help="tokens to generate (default: 16)",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=_count,
        default=4080,
        help="tokens of the prompt (default: 4080)",
    )
    _add_layers(parser)
    _add_processor(parser)
    _add_json_switch(parser)


def _add_inspect(commands: _Commands) -> None:
    parser = _add_command(commands, "inspect", "show what a checkpoint contains")
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    _add_json_switch(parser)


def _add_presets(commands: _Commands) -> None:
    parser = _add_command(commands, "presets", "list the named memory budgets")
    _add_json_switch(parser)


def _add_synth(commands: _Commands) -> None:
    parser = _add_command(
        commands, "synth", "write a checkpoint of the released layout without the released weights"
    )
    parser.add_argument("directory", metavar="DIR", help="a new or an empty directory")
    parser.add_argument(
        "--config", metavar="CONFIG_JSON", help="config of the model (default: the released one)"
    )
    parser.add_argument("--layers", metavar="N", type=_count, help="keep the first N layers")
    parser.add_argument("--experts", metavar="N", type=_count, help="routed experts of a layer")
    parser.add_argument("--vocab", metavar="N", type=_count, help="token ids, at least 320")
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
    _add_json_switch(parser)


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
        "--check", action="store_true", help="compare a finished trunk with its checksums"
    )
    _add_json_switch(parser)


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
        type=_counts,
        help="experts in the cache (default: from an eighth to four times those of a token)",
    )
    parser.add_argument(
        "--skip",
        metavar="TOKENS",
        type=_count_or_none,
        default=0,
        help="tokens that fill the cache but are not counted (default: 0)",
    )
    _add_json_switch(parser)


def _add_bench(commands: _Commands) -> None:
    parser = _add_command(
        commands, "bench", "measure what this machine can do, and the kernels beside it"
    )
    _add_processor(parser)
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything runs; the figures are bad"
    )
    _add_json_switch(parser)


def _add_quiet_switch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="neither progress nor notes")


def _add_json_switch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def _count(text: str, smallest: int = 1) -> int:
    try:
        count = int(text)
    except ValueError:
        count = smallest - 1
    if count < smallest:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least {smallest}, found `{text}`"
        )
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count_or_none(text: str) -> int:
    return _count(text, smallest=0)
