"""NaN and infinity in the weights: a fault with a name, and never a token.

A vector is read when the checkpoint is opened, a matrix or an expert when it is used.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_edit import copy_checkpoint, edited_tensor
from harness import Prompt, RunK3rs, joined
from numpy.typing import NDArray

import k3rs
from k3rs.exceptions import NumericalFault, SessionError

PREFIX = "language_model."
LAYERS = f"{PREFIX}model.layers"
EXPERT_LAYER = 3
EXPERTS = f"{LAYERS}.{EXPERT_LAYER}.block_sparse_moe.experts"

VECTORS = [
    f"{PREFIX}model.norm.weight",
    f"{PREFIX}model.output_attn_res_norm.weight",
    f"{PREFIX}model.output_attn_res_proj.weight",
    *(
        f"{LAYERS}.{name}"
        for name in [
            "0.input_layernorm.weight",
            "0.post_attention_layernorm.weight",
            "1.self_attention_res_norm.weight",
            "1.mlp_res_proj.weight",
            "1.self_attn.A_log",
            "1.self_attn.dt_bias",
            "1.self_attn.o_norm.weight",
            "1.self_attn.k_conv1d.weight",
            "2.self_attn.q_a_layernorm.weight",
            "2.self_attn.kv_a_layernorm.weight",
            "2.block_sparse_moe.gate.e_score_correction_bias",
            "2.block_sparse_moe.routed_expert_norm.weight",
        ]
    ),
]

MATRICES = [
    *(f"0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    *(f"1.self_attn.{name}_proj" for name in ("q", "k", "v", "f_a", "f_b", "b", "g", "o")),
    *(f"2.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
    *(f"2.self_attn.{name}_proj" for name in ("kv_b", "g", "o")),
    "3.block_sparse_moe.gate",
    *(f"4.block_sparse_moe.routed_expert_{name}_proj" for name in ("down", "up")),
    *(f"5.block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
]


@pytest.fixture(params=k3rs.available_backends())
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How to open a model: each instruction set."""
    return {"memory": "1GB", "threads": 1, "backend": request.param}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_with_a_fault_is_named_at_open(copied: Path, name: str, value: float) -> None:
    with edited_tensor(copied, name) as tensor:
        tensor.put(1, value)
    with pytest.raises(NumericalFault) as fault:
        k3rs.Model.open(copied, memory="1GB")
    assert f"`{name}`" in str(fault.value)
    assert "index 1" in str(fault.value)
    assert fault.value.hint


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, "infinity")])
@pytest.mark.parametrize("name", MATRICES)
def test_a_fault_in_a_matrix_is_named(
    copied: Path, prompts: list[Prompt], name: str, value: float, said: str
) -> None:
    """Also an infinity, which the saturating functions behind a product would hide."""
    full_name = f"{LAYERS}.{name}.weight"
    with edited_tensor(copied, full_name) as tensor:
        tensor.put(0, value)
    # Keys are absorbed into queries, so an infinity there may first be seen as NaN.
    where = rf"(NaN|{said}) in the product with tensor `{re.escape(full_name)}`$"
    with k3rs.Model.open(copied, memory="1GB", threads=1) as model:
        with pytest.raises(NumericalFault, match=where):
            model.session().forward(prompts[1].ids)
        with pytest.raises(NumericalFault, match=where):
            next(model.generate(prompts[0].ids))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_of_the_output_matrix(copied: Path, prompts: list[Prompt], value: float) -> None:
    with edited_tensor(copied, f"{PREFIX}lm_head.weight") as tensor:
        tensor.put(0, value)
    with (
        k3rs.Model.open(copied, memory="1GB") as model,
        pytest.raises(
            NumericalFault, match=r"in the product with tensor `language_model\.lm_head\.weight`"
        ),
    ):
        model.session().forward(prompts[0].ids)


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (-math.inf, "infinity")])
def test_a_faulty_embedding_stops_only_its_id_and_the_session(
    copied: Path, model: k3rs.Model, value: float, said: str
) -> None:
    name = f"{PREFIX}model.embed_tokens.weight"
    with edited_tensor(copied, name) as tensor:
        tensor.put(7 * tensor.shape[1] + 3, value)
    ids = [1, 2, 3]
    expected = model.session().forward(ids)
    with k3rs.Model.open(copied, memory="1GB") as broken:
        session, other = broken.session(), broken.session()
        with pytest.raises(NumericalFault, match=rf"{said} in tensor `{name}`, row 7"):
            session.forward([1, 7])
        for _ in range(2):
            with pytest.raises(SessionError) as refused:
                session.forward(ids)
            assert refused.value.hint
        # The model itself is not hurt.
        assert np.array_equal(other.forward(ids), expected)
        session.reset()
        assert session.position == 0
        assert np.array_equal(session.forward(ids), expected)


@pytest.fixture(scope="module")
def used_expert(model: k3rs.Model, prompts: list[Prompt]) -> int:
    """An expert of the layer that the second prompt wakes."""
    _, seen = model.session().forward(prompts[1].ids, capture=("router",))
    experts, _ = seen["router"][EXPERT_LAYER - 1]
    return int(experts[0, 0])


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_a_scale_of_255_is_nan_by_the_format(
    copied: Path, prompts: list[Prompt], used_expert: int, options: dict[str, Any], part: str
) -> None:
    name = f"{EXPERTS}.{used_expert}.{part}.weight_scale"
    with edited_tensor(copied, name) as tensor:
        tensor.put(len(tensor.data) - 1, 255)
    with k3rs.Model.open(copied, **options) as model:
        session = model.session()
        with pytest.raises(NumericalFault) as fault:
            session.forward(prompts[1].ids)
        assert f"`{name}`" in str(fault.value)
        assert "255" in str(fault.value)
        with pytest.raises(SessionError):
            session.forward([1])


def test_a_fault_is_status_4_and_prints_no_token(
    copied: Path, run_k3rs: RunK3rs, prompts: list[Prompt], used_expert: int
) -> None:
    name = f"{EXPERTS}.{used_expert}.w3.weight_scale"
    with edited_tensor(copied, name) as tensor:
        tensor.put(0, 255)
    ids = joined(prompts[1].ids)
    done = run_k3rs("generate", copied, "--ids", ids, "-n", 3)
    assert (done.status, done.stdout) == (4, "")
    assert name in done.stderr
    assert "\nhint: " in done.stderr


def set_scales(directory: Path, expert: int, *, gate: int, down: int) -> None:
    """Sets all scale bytes of `w1` and of `w2`.

    The values of `w2` become at most 1.5, so that the largest scale stays in float32.
    """
    for part, scale in (("w1", gate), ("w2", down)):
        with edited_tensor(directory, f"{EXPERTS}.{expert}.{part}.weight_scale") as tensor:
            tensor.data = bytearray([scale]) * len(tensor.data)
    with edited_tensor(directory, f"{EXPERTS}.{expert}.w2.weight_packed") as tensor:
        # Of a nibble, sign and the two lower bits: 0, 0.5, 1, 1.5.
        tensor.data = bytearray(byte & 0xBB for byte in tensor.data)


def logits_of(directory: Path, ids: list[int], options: dict[str, Any]) -> NDArray[np.float32]:
    with k3rs.Model.open(directory, **options) as model:
        return model.session().forward(ids, all_positions=True)


def test_the_smallest_and_the_largest_scale_are_powers_of_two(
    model_path: Path,
    tmp_path: Path,
    prompts: list[Prompt],
    used_expert: int,
    options: dict[str, Any],
) -> None:
    """A gate of 2^-127 and a down projection of 2^127 cancel.

    Far below one the activation is linear in the gate, so 2^-67 and 2^67 give the same
    expert; the subnormal products of the former have 22 bits left. Were byte 0 zero, or
    were either scale off by one, the expert's part would vanish or double.
    """
    ids = prompts[1].ids
    found = {}
    for gate, down in ((0, 254), (60, 194), (0, 194)):
        directory = copy_checkpoint(model_path, tmp_path / f"{gate} {down}")
        set_scales(directory, used_expert, gate=gate, down=down)
        found[gate, down] = logits_of(directory, ids, options)
    vanished = found[0, 194]
    assert np.abs(found[60, 194] - vanished).max() > 1
    assert np.abs(found[0, 254] - found[60, 194]).max() < 1e-3


def test_a_product_beyond_float32_is_a_fault(
    copied: Path, prompts: list[Prompt], used_expert: int, options: dict[str, Any]
) -> None:
    with edited_tensor(copied, f"{EXPERTS}.{used_expert}.w2.weight_scale") as tensor:
        tensor.data = bytearray([254]) * len(tensor.data)
    where = rf"in the products with expert {used_expert} of layer {EXPERT_LAYER}$"
    with k3rs.Model.open(copied, **options) as model, pytest.raises(NumericalFault, match=where):
        model.session().forward(prompts[1].ids)
