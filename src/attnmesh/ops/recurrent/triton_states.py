"""The passes over the chunks of a recurrence in Triton: states one after another, and their gradients in reverse.

A program keeps some columns of the state of one head in registers, transposed [V, K], from chunk to chunk:

    values = u - w S                          by_values = p^T by_out + to_end k by_S
    outputs = scale from_start q S + p values + skip v
    S = whole S + (to_end k)^T values         by_S = whole by_S + (scale from_start q)^T by_out - w^T by_values

Transposed, the state is the left factor of its products: tensor cores read it from the registers that hold their sums,
so that no step waits for shared memory to pass on the result of the step before.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False, disable-error-code="assignment"
import triton
import triton.language as tl

from attnmesh.ops.dense.triton_tiles import at_head
from attnmesh.ops.recurrent.triton_chunks import SIZES, block_pointers, load_positions


@triton.jit
def _state_pointers(base, number, column, K: tl.constexpr, V, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers to columns of a state [K, V], transposed [BV, BK], and which of them there are."""
    key, value = tl.arange(0, BK)[None, :], column + tl.arange(0, BV)[:, None]
    return base + number.to(tl.int64) * (K * V) + key * V + value, (key < K) & (value < V)


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    q, q_strides, k, k_strides, p, w, u, gates, whole, initial, final, transition, states, values, out, out_strides,
    skip, v, v_strides, length, chunks, heads, groups,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states after all chunks, from `initial` or 0, and what is not None of the following.

    `out` has the outputs; `states` [.., V, K] the state before every chunk, and `values` [.., V, C] what it wrote.
    `transition` [B, H, K, K] has the columns that begin as the identity and write nothing: programs beyond the columns
    of values compute them.
    """
    block, sequence = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    batch, head = sequence // heads, sequence % heads
    group = head // (heads // groups)
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    dtype = k.dtype.element_ty
    first = sequence * chunks
    state = tl.zeros((BV, BK), tl.float32)
    if initial is not None:
        pointers, mask = _state_pointers(initial, sequence, block * BV, K, V, BK, BV)
        state = tl.load(pointers, mask=mask, other=0.0)
    if BLOCKS > VALUE_BLOCKS:
        own = (block - VALUE_BLOCKS) * BV + tl.arange(0, BV)
        state = tl.where(tl.arange(0, BK)[None, :] == own[:, None], 1.0, state)  # own < 0 for columns of values
    k = at_head(k, k_strides, batch, group)
    if out is not None:
        q = at_head(q, q_strides, batch, group)
        out = at_head(out, out_strides, batch, head) + block * BV
        if skip is not None:
            weight = tl.load(skip + head).to(tl.float32)
            v = at_head(v, v_strides, batch, head) + block * BV

    # What no product waits for is loaded a turn ahead: Triton loads only operands of products early.
    gates += first.to(tl.int64) * (2 * C) + tl.arange(0, C)
    decay = tl.load(whole + first)
    if out is not None:
        from_start = tl.load(gates)
    for chunk in range(chunks):
        number, begin = first + chunk, chunk * C
        next_chunk = tl.minimum(chunk + 1, chunks - 1)
        next_decay = tl.load(whole + first + next_chunk)
        if out is not None:
            next_from_start = tl.load(gates + next_chunk * (2 * C))
        at = number * VALUE_BLOCKS + block
        low = state.to(dtype)
        if states is not None:
            tl.store(block_pointers(states, at, BV, BK), low)
        if BLOCKS > VALUE_BLOCKS:
            value = tl.load(
                block_pointers(u, at, BV, C), mask=(tl.zeros((BV, C), tl.int32) + block) < VALUE_BLOCKS, other=0.0
            )
        else:
            value = tl.load(block_pointers(u, at, BV, C))
        value = value.to(tl.float32)
        if DELTA:
            erased = tl.load(block_pointers(w, number, C, BK))
            value -= tl.dot(low, tl.trans(erased), input_precision=PRECISION)
        if values is not None:
            tl.store(block_pointers(values, at, BV, C), value.to(dtype))
        if out is not None:
            queries = load_positions(q, q_strides[2], begin, length, C, K, BK)
            mix = tl.load(block_pointers(p, number, C, C))
            result = tl.dot(low, tl.trans(queries), input_precision=PRECISION) * from_start[None, :]
            result = tl.dot(value.to(dtype), tl.trans(mix), result, input_precision=PRECISION)
            row, column = begin + tl.arange(0, C), tl.arange(0, BV)
            there = (row < length)[:, None] & (block * BV + column < V)[None, :]
            within = tl.arange(0, C)[:, None] * out_strides[2] + column[None, :]
            rows = out + tl.cast(begin, tl.int64) * out_strides[2] + within
            result = tl.trans(result)
            if skip is not None:
                within = tl.arange(0, C)[:, None] * v_strides[2] + column[None, :]
                given = tl.load(v + tl.cast(begin, tl.int64) * v_strides[2] + within, mask=there, other=0.0)
                result += weight * given.to(tl.float32)
            tl.store(rows, result.to(out.dtype.element_ty), mask=there)
            from_start = next_from_start
        keys = load_positions(k, k_strides[2], begin, length, C, K, BK)
        value = (value * tl.load(gates + chunk * (2 * C) + C)[None, :]).to(dtype)
        state = tl.dot(value, keys, state * decay, input_precision=PRECISION)
        decay = next_decay

    if final is not None and (BLOCKS == VALUE_BLOCKS or block < VALUE_BLOCKS):
        last, there = _state_pointers(final, sequence, block * BV, K, V, BK, BV)
        tl.store(last, state, mask=there)
    if BLOCKS > VALUE_BLOCKS and block >= VALUE_BLOCKS:
        last, there = _state_pointers(transition, sequence, (block - VALUE_BLOCKS) * BV, K, K, BK, BV)
        tl.store(last, state, mask=there)


@triton.jit(do_not_specialize=SIZES)
def state_gradients_kernel(
    q, q_strides, k, k_strides, by_out, by_out_strides, p, w, gates, whole, by_final, by_initial, by_states, by_values,
    length, chunks, heads, groups,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state before all chunks, from those of the outputs and of the last state, `by_final`, or 0.

    `by_states` [.., V, K] has the gradients of the states after every chunk, and `by_values` [.., V, C] those of what
    it wrote; None if nobody reads them.
    """
    block, sequence = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    batch, head = sequence // heads, sequence % heads
    group = head // (heads // groups)
    dtype = k.dtype.element_ty
    first = sequence * chunks
    state = tl.zeros((BV, BK), tl.float32)
    if by_final is not None:
        pointers, mask = _state_pointers(by_final, sequence, block * BV, K, V, BK, BV)
        state = tl.load(pointers, mask=mask, other=0.0)
    k, q = at_head(k, k_strides, batch, group), at_head(q, q_strides, batch, group)
    by_out = at_head(by_out, by_out_strides, batch, head) + block * BV

    # What no product waits for is loaded a turn ahead: Triton loads only operands of products early.
    gates += first.to(tl.int64) * (2 * C) + tl.arange(0, C)
    decay = tl.load(whole + first + chunks - 1)
    to_end = tl.load(gates + (chunks - 1) * (2 * C) + C)
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        number, begin = first + chunk, chunk * C
        next_chunk = tl.maximum(chunk - 1, 0)
        next_decay = tl.load(whole + first + next_chunk)
        next_to_end = tl.load(gates + next_chunk * (2 * C) + C)
        at = number * BLOCKS + block
        low = state.to(dtype)
        if by_states is not None:
            tl.store(block_pointers(by_states, at, BV, BK), low)
        row, column = begin + tl.arange(0, C), tl.arange(0, BV)
        there = (row < length)[:, None]
        if V % BV != 0:
            there = there & (block * BV + column < V)[None, :]
        within = tl.arange(0, C)[:, None] * by_out_strides[2] + column[None, :]
        grad = tl.load(by_out + tl.cast(begin, tl.int64) * by_out_strides[2] + within, mask=there, other=0.0)
        keys = load_positions(k, k_strides[2], begin, length, C, K, BK)
        queries = load_positions(q, q_strides[2], begin, length, C, K, BK)
        state *= decay
        if DELTA or by_values is not None:
            mix = tl.load(block_pointers(p, number, C, C))
            by_value = tl.dot(low, tl.trans(keys), input_precision=PRECISION) * to_end[None, :]
            by_value = tl.dot(tl.trans(grad), mix, by_value, input_precision=PRECISION).to(dtype)
            if by_values is not None:
                tl.store(block_pointers(by_values, at, BV, C), by_value)
            if DELTA:
                erased = tl.load(block_pointers(w, number, C, BK))
                state = tl.dot(-by_value, erased, state, input_precision=PRECISION)
        queries = (queries.to(tl.float32) * tl.load(gates + chunk * (2 * C))[:, None]).to(dtype)
        state = tl.dot(tl.trans(grad), queries, state, input_precision=PRECISION)
        decay, to_end = next_decay, next_to_end

    pointers, mask = _state_pointers(by_initial, sequence, block * BV, K, V, BK, BV)
    tl.store(pointers, state, mask=mask)
