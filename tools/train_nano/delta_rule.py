"""The gated delta rule over chunks of tokens: matrix products instead of a step for each token.

For one head, with state `S` [key, value], decay `a_t` per key channel and strength `b_t`:

    S_t' = diag(a_t) S_{t-1}
    e_t = b_t (v_t - S_t'^T k_t)
    S_t = S_t' + k_t e_t^T
    o_t = S_t^T q_t

Let `G_t` be the sum of log decays from the start of a chunk to token `t`. Unrolling within the
chunk gives a triangular system for all `e_t` (parallelised as in Gated DeltaNet and Kimi Linear):

    (I + diag(b) A) E = diag(b) (V - (K exp G) S_0)
    A_ts = sum_c k_tc k_sc exp(G_tc - G_sc) for s < t, otherwise 0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: Tokens of a chunk. With log decays above -5 the exponentials below stay within exp(+-40),
#: and their products within float32.
CHUNK = 16


def delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, strength: jax.Array
) -> jax.Array:
    """Outputs [B, T, heads, d] from an empty state; all inputs [B, T, heads, d], `strength`
    [B, T, heads]. `T` is a multiple of `CHUNK`."""
    batch, length, heads, width = query.shape

    def chunks(x: jax.Array) -> jax.Array:
        """[B, T, heads, n] to [chunks, B * heads, CHUNK, n]."""
        parts = x.reshape(batch, length // CHUNK, CHUNK, heads, -1).transpose(1, 0, 3, 2, 4)
        return parts.reshape(length // CHUNK, batch * heads, CHUNK, -1)

    query, key, value, log_decay = map(chunks, (query, key, value, log_decay))
    strength = chunks(strength)
    decay = jnp.cumsum(log_decay, axis=-2)
    total = decay[..., -1:, :]
    # Halfway as the origin keeps both factors of exp(G_t - G_s) small.
    middle = 0.5 * total
    later = jnp.exp(decay - middle)
    earlier = (key * jnp.exp(middle - decay)).swapaxes(-1, -2)
    overlap = jnp.tril((key * later) @ earlier, -1)
    answer = jnp.tril((query * later) @ earlier)
    inverse = unit_lower_inverse(strength * overlap)
    written = inverse @ (strength * value)
    forgotten = inverse @ (strength * key * jnp.exp(decay))
    inputs = (
        written,
        forgotten,
        query * jnp.exp(decay),
        answer,
        (key * jnp.exp(total - decay)).swapaxes(-1, -2),
        jnp.exp(total).swapaxes(-1, -2),
    )

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        written, forgotten, query, answer, key, total = chunk
        errors = written - forgotten @ state
        output = query @ state + answer @ errors
        return total * state + key @ errors, output

    empty = jnp.zeros((batch * heads, width, width), query.dtype)
    _, output = jax.lax.scan(step, empty, inputs)
    output = output.reshape(length // CHUNK, batch, heads, CHUNK, width)
    return output.transpose(1, 0, 3, 2, 4).reshape(batch, length, heads, width)


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of `I + lower` for strictly lower triangular matrices [..., n, n], n = 2^m.

    Diagonal blocks of twice the size are inverted from those of one size:
    the block below the diagonal of [[A, 0], [C, D]]^-1 is -D^-1 C A^-1.
    """
    size = lower.shape[-1]
    rows, columns = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    inverse = jnp.eye(size, dtype=lower.dtype)
    block = 1
    while block < size:
        same = rows // (2 * block) == columns // (2 * block)
        below = jnp.where(same & (rows // block > columns // block), lower, 0.0)
        inverse = inverse - (below if block == 1 else inverse @ below @ inverse)
        block *= 2
    return inverse


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    transposed = inverse.swapaxes(-1, -2)
    return (-jnp.tril(transposed @ gradient @ transposed, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
