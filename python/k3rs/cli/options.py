"""Arguments that several commands have, with the meaning that they share."""

import argparse

__all__ = [
    "add_budget",
    "add_compute",
    "add_json_switch",
    "add_layers",
    "add_output",
    "add_place",
    "add_probe",
    "add_processor",
    "add_quiet_switch",
    "add_sampling",
    "add_state",
    "add_weights",
    "count",
    "count_or_none",
    "counts",
]


def add_budget(parser: argparse.ArgumentParser) -> None:
    """How much memory: a size, a preset, or the two shares."""
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


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Which weights run, and where the trunk comes from."""
    parser.add_argument(
        "--trunk", metavar="DIR", help="stream the trunk from there; `k3rs pack` made it"
    )
    add_layers(parser)


def add_layers(parser: argparse.ArgumentParser) -> None:
    """A part of the model."""
    parser.add_argument(
        "--layers",
        metavar="N",
        type=count,
        help="only the first N layers, as if there were no others: for study",
    )


def add_processor(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    """What computes."""
    group.add_argument(
        "--threads", metavar="N", type=count, help="compute threads (default: physical cores)"
    )
    group.add_argument(
        "--backend",
        choices=("auto", "avx512", "avx2", "scalar"),
        default="auto",
        help="instruction set (default: the best that the CPU has)",
    )


def add_compute(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """What computes, and in which pieces; returns the group."""
    group = parser.add_argument_group("computing (no bit of the output depends on it)")
    add_processor(group)
    group.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=count,
        help="tokens per sweep of the text that is read",
    )
    return group


def add_sampling(parser: argparse.ArgumentParser, title: str) -> "argparse._ArgumentGroup":
    """How tokens are chosen; returns the group."""
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


def add_state(parser: argparse.ArgumentParser) -> None:
    """Where a text and the model's memory of it are kept."""
    group = parser.add_argument_group("a text that goes on")
    group.add_argument(
        "--save-state", metavar="PATH", help="keep the text and the model's memory of it"
    )
    group.add_argument(
        "--load-state", metavar="PATH", help="go on from there; what is new is put behind it"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """What is written, and how loud it is."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        metavar="PATH",
        help='the run as JSON; "-" is stdout, where then no text is printed',
    )
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=count_or_none,
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


def add_json_switch(parser: argparse.ArgumentParser) -> None:
    """Facts for a program."""
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def add_quiet_switch(parser: argparse.ArgumentParser) -> None:
    """Silence."""
    parser.add_argument("--quiet", action="store_true", help="neither progress nor notes")


def count(text: str, smallest: int = 1) -> int:
    """A whole number of at least `smallest`."""
    try:
        count = int(text)
    except ValueError:
        count = smallest - 1
    if count < smallest:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least {smallest}, found `{text}`"
        )
    return count


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [count(part) for part in text.split(",")]


def count_or_none(text: str) -> int:
    """A whole number, 0 included."""
    return count(text, smallest=0)


def add_place(parser: argparse.ArgumentParser, model_help: str) -> None:
    """A model, whose files are read, or a directory, which gets a temporary one."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("model", metavar="MODEL", nargs="?", help=model_help)
    place.add_argument(
        "--directory",
        metavar="DIR",
        help="without a model: where the disk is measured (default: the current directory)",
    )


def add_probe(parser: argparse.ArgumentParser) -> None:
    """How long, and how large the temporary file is."""
    parser.add_argument(
        "--seconds",
        metavar="X",
        type=float,
        default=1.0,
        help="time for each of two kinds of reads (default: 1)",
    )
    parser.add_argument(
        "--probe-size",
        metavar="SIZE",
        help="size of the temporary file (default: 1GiB, or a quarter of the room)",
    )
