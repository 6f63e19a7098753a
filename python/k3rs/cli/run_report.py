"""What a run did: as JSON for a program, and in a line for a person."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import k3rs
from k3rs.generation import StopReason
from k3rs.sizes import format_size

__all__ = ["LiveCost", "Run", "logprob_lines", "run_json", "summary"]


@dataclass(slots=True)
class Run:
    """A run of `k3rs generate`, filled while it goes on."""

    prompt_ids: list[int]
    open_seconds: float
    loaded_positions: int = 0
    """Ids of the text that was loaded, in front of the prompt."""
    tokens: list[k3rs.Token] = field(default_factory=list)
    interrupted: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_seconds(self) -> float:
        """Time since the model was open."""
        return max(time.perf_counter() - self.started, 1e-9)

    @property
    def stop_reason(self) -> StopReason | Literal["interrupted"]:
        """Why it ended."""
        if self.interrupted or not self.tokens:
            return "interrupted"
        return self.tokens[-1].stop_reason or "interrupted"

    @property
    def prefill_seconds(self) -> float:
        """Time of the step that read the prompt and made the first token."""
        return self.tokens[0].seconds if self.tokens else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time of all later steps."""
        return sum(token.seconds for token in self.tokens[1:])


_MODEL_KEYS = ("path", "layers", "hidden", "vocab", "parameters", "fingerprint")
_PLAN_KEYS = (
    "budget_bytes",
    "entries",
    "pinned_bytes",
    "pinned_fraction",
    "ring_bytes",
    "expert_slots",
)
_IO_KEYS = ("trunk_bytes_read", "expert_bytes_read", "read_wait_s", "direct", "why")
_EXPERT_KEYS = ("requests", "hits", "distinct")


def run_json(run: Run, model: k3rs.Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a run. `options` are those of the command, beside the engine's own.

    `seconds_per_token` and `tokens_per_s` are of the steps after the first, and null
    where there was no other.
    """
    report = model.report()
    decode_seconds, steps = run.decode_seconds, len(run.tokens) - 1
    measured = steps > 0 and decode_seconds > 0
    text = "".join(token.text for token in run.tokens)
    return {
        "model": _pick(model.facts["model"], _MODEL_KEYS),
        "loaded_positions": run.loaded_positions,
        "prompt_ids": run.prompt_ids,
        "generated_ids": [token.id for token in run.tokens],
        "text": None if model.tokenizer is None else text,
        "stop_reason": run.stop_reason,
        "logprobs": list(_logprob_facts(run, model)) or None,
        "options": {**model.facts["options"], **options},
        "plan": _pick(model.plan, _PLAN_KEYS),
        "time": {
            "open_s": run.open_seconds,
            "prefill_s": run.prefill_seconds,
            "decode_s": decode_seconds,
            "tokens_per_s": steps / decode_seconds if measured else None,
            "seconds_per_token": decode_seconds / steps if measured else None,
            "steps_s": [token.seconds for token in run.tokens],
        },
        "io": _pick(report["io"], _IO_KEYS),
        "experts": _pick(report["experts"], _EXPERT_KEYS),
        "memory": _pick(report["memory"], ("peak_rss_bytes",)),
    }


def _logprob_facts(run: Run, model: k3rs.Model) -> Iterator[dict[str, Any]]:
    """For each token its log-probability and those of the most likely, if they were asked for."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = None if model.tokenizer is None else model.tokenizer.decode([token_id])
        return {"id": token_id, "text": text, "logprob": logprob}

    for token in run.tokens:
        if token.logprobs is not None:
            top = [named(*alternative) for alternative in token.logprobs.top]
            yield {**named(token.id, token.logprobs.chosen), "top": top}


def logprob_lines(run: Run, model: k3rs.Model) -> Iterator[str]:
    """The same for a person: a line a token."""

    def name(facts: Mapping[str, Any]) -> str:
        return str(facts["id"]) if facts["text"] is None else repr(facts["text"])

    for facts in _logprob_facts(run, model):
        top = [f"{name(other)} {other['logprob']:.3f}" for other in facts["top"]]
        line = f"{name(facts):<16} {facts['logprob']:>8.3f}   {'  '.join(top)}"
        yield line.rstrip()


def summary(run: Run, model: k3rs.Model) -> Iterator[str]:
    """The run in three lines: how long it took, what memory held, and what it cost."""
    report = model.report()
    io, experts = report["io"], report["experts"]
    prompt = f"prompt of {len(run.prompt_ids)}"
    if run.loaded_positions:
        prompt += f" behind {run.loaded_positions} loaded"
    if run.tokens:
        words = [f"{prompt} in {run.prefill_seconds:.2f} s"]
        words.append(f"{len(run.tokens)} tokens ({run.stop_reason})")
    else:
        words = [f"{prompt} given up after {run.elapsed_seconds:.2f} s"]
    if run.decode_seconds > 0:
        words.append(_pace((len(run.tokens) - 1) / run.decode_seconds))
    yield "; ".join(words)
    read = io["trunk_bytes_read"] + io["expert_bytes_read"]
    resident = 1 - io["trunk_bytes_read"] / max(1, io["trunk_bytes_used"])
    cached = experts["hits"] / max(1, experts["requests"])
    yield f"found in memory: {resident:.1%} of the trunk, {cached:.1%} of the experts"
    yield (
        f"read {format_size(read)}, {io['read_wait_s'] / run.elapsed_seconds:.0%} of the time "
        f"waiting for it; peak memory {format_size(report['memory']['peak_rss_bytes'])}"
    )


class LiveCost:
    """What a run has cost until now, in a few words: time, bytes, rates, and time to go."""

    def __init__(self, model: k3rs.Model, run: Run, max_tokens: int) -> None:
        self._model = model
        self._run = run
        self._max_tokens = max_tokens

    def __call__(self) -> str:
        """The words, as of now."""
        report = self._model.report()
        io, experts = report["io"], report["experts"]
        elapsed = self._run.elapsed_seconds
        read = io["trunk_bytes_read"] + io["expert_bytes_read"]
        words = [
            str(timedelta(seconds=int(elapsed))),
            f"read {format_size(read)}",
            f"{format_size(read / elapsed)}/s",
        ]
        if experts["requests"]:
            words.append(f"{experts['hits'] / experts['requests']:.0%} of experts cached")
        steps = len(self._run.tokens) - 1
        if steps > 0 and self._run.decode_seconds > 0:
            pace = steps / self._run.decode_seconds
            left = (self._max_tokens - len(self._run.tokens)) / pace
            words += [_pace(pace), f"{timedelta(seconds=round(left))} to go"]
        return ", ".join(words)


def _pace(tokens_per_second: float) -> str:
    """Tokens a second, or seconds a token where that is the readable number."""
    if tokens_per_second >= 1:
        return f"{tokens_per_second:.2f} tokens/s"
    return f"{1 / tokens_per_second:.2f} s/token"


def _pick(facts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: facts[name] for name in names}
