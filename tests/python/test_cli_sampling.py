"""How `k3rs generate` chooses tokens, ends a text, and says how likely tokens were."""

import numpy as np
import pytest
from harness import RunK3rs

import k3rs


def text_of(model: k3rs.Model, ids: list[int]) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(ids)


def test_log_probabilities_are_reported(run_k3rs: RunK3rs, model: k3rs.Model) -> None:
    arguments = ["generate", model.path, "--ids", "3,4,5", "-n", "3", "--ignore-stop"]
    facts = run_k3rs(*arguments, "--logprobs", "2", "--json", "-").facts
    assert [step["id"] for step in facts["logprobs"]] == facts["generated_ids"]
    session = model.session()
    ids = [3, 4, 5]
    for step in facts["logprobs"]:
        logits = session.forward(ids).astype(np.float64)
        expected = logits - np.log(np.sum(np.exp(logits)))
        order = np.argsort(-logits, kind="stable")[:2].tolist()
        assert [other["id"] for other in step["top"]] == order
        assert step["logprob"] == pytest.approx(expected[step["id"]], abs=1e-9)
        for other in step["top"]:
            assert other["logprob"] == pytest.approx(expected[other["id"]], abs=1e-9)
            assert other["text"] == text_of(model, [other["id"]])
        ids = [step["id"]]
    shown = run_k3rs(*arguments, "--logprobs", "1").stderr.splitlines()[:3]
    for line, step in zip(shown, facts["logprobs"], strict=True):
        name, value = repr(step["text"]), f"{step['logprob']:.3f}"
        assert line.split() == f"{name} {value} {name} {value}".split()


def test_stop_strings_end_the_text(run_k3rs: RunK3rs) -> None:
    arguments = ["generate", "--prompt", "In the beginning", "-n", "40"]
    whole = run_k3rs(*arguments, "--json", "-").facts["text"]
    facts = run_k3rs(*arguments, "--json", "-", "--stop", "nowhere", "--stop", " third").facts
    assert facts["text"] == whole[: whole.index(" third")]
    assert facts["stop_reason"] == "stop_string"
    assert run_k3rs(*arguments, "--stop", " third").stdout == facts["text"] + "\n"
    empty = run_k3rs(*arguments, "--stop", "")
    assert (empty.status, empty.stdout) == (2, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--top-p", "1.0001"],
        ["--top-k", "-1"],
        ["--min-p", "2"],
        ["--seed", "-1"],
        ["--repetition-penalty", "0"],
        ["--presence-penalty", "nan"],
        ["--frequency-penalty", "2.5"],
        ["--logprobs", "-1"],
    ],
)
def test_a_sampler_out_of_range_is_a_usage_error(run_k3rs: RunK3rs, arguments: list[str]) -> None:
    refused = run_k3rs("generate", "--prompt", "the", *arguments)
    assert (refused.status, refused.stdout) == (2, "")
    assert arguments[1] in refused.stderr
    assert "\nhint: " in refused.stderr
