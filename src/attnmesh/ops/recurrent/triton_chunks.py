"""Chunks of a recurrence with one decay per head in Triton: what needs no state, and the gradients of all inputs.

With the decays `from_start` (from the begin of the chunk to a position), `to_end` and `between` (from position j to i),

    p = scale between (q k^T)                                              what outputs read within the chunk
    t = (I + lower(beta between (k k^T)))^-1                               the delta rule; else I
    w = t (beta from_start k),  u = t (beta v)                             erased per state, and written

The passes over chunks (below) compute `values = u - w S` and outputs from these. Two layouts serve them:
rows of a chunk [C, K] for what is multiplied from the right, and columns [V, C] for `u` and `values`, since the passes
keep states transposed, [V, K].

The gradients follow from the gradients of `values` and of the states after each chunk, `by_values` and `by_states`:

    by_w = -by_values S^T,  y = t^T by_values,  z = t^T by_w,  by_t = -(y u^T + z w^T)

They are computed transposed, [K, C]: tensor cores multiply at least 64 rows per four warps, and keys have more of them.

Sums of logarithms of decays: float32 inputs sum between every pair of positions, so that a weak decay after a strong
one keeps its digits. 16-bit inputs take differences of sums from the begin of the chunk, where a decay below the
smallest float32 counts as 0, as a document start does.

The passes over the chunks of a recurrence in Triton: states one after another, and their gradients in reverse.

A program keeps some columns of the state of one head in registers, transposed [V, K], from chunk to chunk:

    values = u - w S                          by_values = p^T by_out + to_end k by_S
    outputs = scale from_start q S + p values + skip v
    S = whole S + (to_end k)^T values         by_S = whole by_S + (scale from_start q)^T by_out - w^T by_values

Transposed, the state is the left factor of its products: tensor cores read it from the registers that hold their sums,
so that no step waits for shared memory to pass on the result of the step before.
"""

# mypy: disable-error-code="assignment"
import triton
import triton.language as tl

from attnmesh.ops.dense.triton_tiles import at_head, locate, rows_of, tile_pointers

SIZES = ["length", "chunks", "heads", "groups", "splits"]  # not specialized: other sizes would compile anew
_LOWEST = tl.constexpr(-87.0)  # the logarithm of the smallest float32


@triton.jit
def _positions(rows, begin, length, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMN: tl.constexpr):
    """Pointers to rows [begin, begin + C) of one head, from a column on, and which are before `length` and column D."""
    mask = (begin + tl.arange(0, C) < length)[:, None]
    if D - COLUMN < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < D - COLUMN)[None, :]
    return tile_pointers(rows[0] + COLUMN, rows[1], begin, C, BLOCK_D), mask


@triton.jit
def load_positions(
    rows, begin, length, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMN: tl.constexpr = 0
):
    """Rows [begin, begin + C) of one head, from a column on; 0 from `length` and from column D on."""
    pointers, mask = _positions(rows, begin, length, C, D, BLOCK_D, COLUMN)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_positions(
    rows, begin, length, tile, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMN: tl.constexpr = 0
):
    """The inverse of `load_positions`, in the dtype of the rows."""
    pointers, mask = _positions(rows, begin, length, C, D, BLOCK_D, COLUMN)
    tl.store(pointers, tile.to(rows[0].dtype.element_ty), mask=mask)


@triton.jit
def block_pointers(base, number, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a dense block [ROWS, COLUMNS], the `number`th of a tensor."""
    within = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return base + tl.cast(number, tl.int64) * (ROWS * COLUMNS) + within


@triton.jit
def _per_position(base, strides, batch, head, begin, length, C: tl.constexpr):
    """One number per position, float32; 0 from `length` on."""
    rows = begin + tl.arange(0, C)
    values = tl.load(at_head(base, strides, batch, head) + rows * strides[2], mask=rows < length, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _log_decays(g, g_strides, ages, age_stride, batch, head, begin, length, C: tl.constexpr):
    """The logarithms of a chunk's decays; -inf where a document starts."""
    logs = _per_position(g, g_strides, batch, head, begin, length, C)
    if ages is not None:
        rows = begin + tl.arange(0, C)
        age = tl.load(ages + batch.to(tl.int64) * age_stride + rows, mask=rows < length, other=1)
        logs = tl.where(age == 0, float("-inf"), logs)
    return logs


@triton.jit
def _decays(logs, C: tl.constexpr, EXACT: tl.constexpr):
    """The decays from the begin of the chunk, to its end, and of the whole chunk."""
    if EXACT:
        later = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
        from_start = tl.exp(tl.cumsum(logs, 0))
        to_end = tl.exp(tl.sum(tl.where(later, logs[:, None], 0.0), 0))
        whole = tl.exp(tl.sum(logs, 0))
    else:
        sums, resets = _sums(logs)
        last, count = tl.sum(tl.where(logs < _LOWEST, 0.0, logs), 0), tl.sum((logs < _LOWEST).to(tl.int32), 0)
        from_start = tl.exp(tl.where(resets == 0, sums, float("-inf")))
        to_end = tl.exp(tl.where(resets == count, last - sums, float("-inf")))
        whole = tl.where(count == 0, tl.exp(last), 0.0)
    return from_start, to_end, whole


@triton.jit
def _sums(logs):
    """The sums of the logarithms up to every position, and the number of positions that forget everything."""
    forgets = logs < _LOWEST
    return tl.cumsum(tl.where(forgets, 0.0, logs), 0), tl.cumsum(forgets.to(tl.int32), 0)


@triton.jit
def _decays_between(logs, C: tl.constexpr, EXACT: tl.constexpr, AXIS: tl.constexpr = 0):
    """[i, j], or [j, i] with AXIS 1: the decay from position j to position i; 0 for j > i.

    Computed either way: to transpose the tile takes longer, and Triton 3.4 to 3.6 miscompile products on Hopper whose
    left factor is a tile that was transposed in registers.
    """
    i, j = tl.expand_dims(tl.arange(0, C), 1 - AXIS), tl.expand_dims(tl.arange(0, C), AXIS)
    if EXACT:
        between = tl.cumsum(tl.where(i > j, tl.expand_dims(logs, 1 - AXIS), 0.0), AXIS)
        result = tl.exp(tl.where(i >= j, between, float("-inf")))
    else:
        sums, resets = _sums(logs)
        reached = (i >= j) & (tl.expand_dims(resets, 1 - AXIS) == tl.expand_dims(resets, AXIS))
        between = tl.expand_dims(sums, 1 - AXIS) - tl.expand_dims(sums, AXIS)
        result = tl.exp(tl.where(reached, between, float("-inf")))
    return result


@triton.jit
def _unit_lower_inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C], in float32.

    Blocks of 16 on the diagonal by substitution, column by column. With x the inverse of the blocks on the diagonal and
    n = x times the blocks below them, the inverse is (I + n)^-1 x, and n^4 = 0: (I - n) (I + n^2) x.
    """
    BLOCKS: tl.constexpr = C // 16
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    diagonal = row // 16 == column // 16
    blocks = tl.sum(tl.where(diagonal, a, 0.0).reshape(BLOCKS, 16, BLOCKS, 16), 2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) + tl.zeros((BLOCKS, 16, 16), tl.float32)
    for at in range(15):
        left = tl.sum(tl.where(j == at, blocks, 0.0), 2)
        right = tl.sum(tl.where(i == at, x, 0.0), 1)
        x -= left[:, :, None] * right[:, None, :]
    x = tl.broadcast_to(x[:, :, None, :], (BLOCKS, 16, BLOCKS, 16)).reshape(C, C)
    x = tl.where(diagonal, x, 0.0)
    if BLOCKS > 1:
        n = tl.dot(x, tl.where(diagonal, 0.0, a), input_precision=PRECISION)
        y = x
        if BLOCKS > 2:
            y = tl.dot(tl.dot(n, n, input_precision=PRECISION), x, x, input_precision=PRECISION)
        x = tl.dot(-n, y, y, input_precision=PRECISION)
    return x


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, beta, beta_strides, ages, age_stride,
    p, t, w, u, gates, whole, length, chunks, heads, groups, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk needs no state for: p, w [C, K], u [V, C], and the decays. `t` is None if nobody reads it."""
    head, chunk, batch = locate(heads, chunks)  # heads that read the same keys are adjacent
    group, begin = head // (heads // groups), chunk * C
    number = (batch * heads + head) * chunks + chunk
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    dtype = q.dtype.element_ty

    logs = _log_decays(g, g_strides, ages, age_stride, batch, head, begin, length, C)
    from_start, to_end, decay = _decays(logs, C, EXACT)
    step = tl.full((C,), 1.0, tl.float32)
    if beta is not None:
        step = _per_position(beta, beta_strides, batch, head, begin, length, C)
    if DELTA:
        keys = load_positions(rows_of(k, k_strides, batch, group), begin, length, C, K, BK)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        products *= step[:, None] * _decays_between(logs, C, EXACT)
        inverse = _unit_lower_inverse(tl.where(row > column, products, 0.0), C, PRECISION).to(dtype)
    # Written here, so that the keys are read again rather than kept in registers.
    gate_pointers = gates + number.to(tl.int64) * (2 * C) + tl.arange(0, C)
    tl.store(gate_pointers, scale * from_start)
    tl.store(gate_pointers + C, to_end)
    tl.store(whole + number, decay)
    keys = load_positions(rows_of(k, k_strides, batch, group), begin, length, C, K, BK)
    if DELTA:
        if t is not None:
            tl.store(block_pointers(t, number, C, C), inverse)
        erased = ((step * from_start)[:, None] * keys.to(tl.float32)).to(dtype)
        tl.store(block_pointers(w, number, C, BK), tl.dot(inverse, erased, input_precision=PRECISION).to(dtype))
    values = rows_of(v, v_strides, batch, head)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    for block in tl.static_range(BLOCKS):
        written = load_positions(values, begin, length, C, V, BV, block * BV)
        written = (step[:, None] * written.to(tl.float32)).to(dtype)
        if DELTA:
            written = tl.dot(inverse, written, input_precision=PRECISION).to(dtype)
        tl.store(block_pointers(u, number * BLOCKS + block, BV, C), tl.trans(written))
    queries = load_positions(rows_of(q, q_strides, batch, group), begin, length, C, K, BK)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    tl.store(block_pointers(p, number, C, C), (scale * products * _decays_between(logs, C, EXACT)).to(dtype))


@triton.jit(do_not_specialize=SIZES)
def gradients_kernel(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, beta, beta_strides, ages, age_stride,
    by_out, by_out_strides, p, states, values, by_states, by_values,
    by_q, by_k, by_v, by_v_strides, by_g, by_beta, skip, by_skip, length, chunks, heads, groups, splits, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk, by way of the outputs and of what is added to the state.

    Those of q and k are sums over a share of the heads of a group, [splits, B, G, S, K]. With DELTA,
    `delta_gradients_kernel` adds to the gradients of k and g, and computes the others.
    """
    share, chunk, rest = locate(splits, chunks)
    group, batch = rest % groups, rest // groups
    begin, ratio = chunk * C, heads // groups
    near = tl.arange(0, C)
    dtype = q.dtype.element_ty
    BLOCKS: tl.constexpr = (V + BV - 1) // BV

    keys = load_positions(rows_of(k, k_strides, batch, group), begin, length, C, K, BK)
    queries = load_positions(rows_of(q, q_strides, batch, group), begin, length, C, K, BK)
    grad_q = tl.zeros((BK, C), tl.float32)
    grad_k = tl.zeros((BK, C), tl.float32)
    for member in range(share * ratio // splits, (share + 1) * ratio // splits):
        head = group * ratio + member
        number = (batch * heads + head) * chunks + chunk
        logs = _log_decays(g, g_strides, ages, age_stride, batch, head, begin, length, C)
        from_start, to_end, decay = _decays(logs, C, EXACT)
        step = tl.full((C,), 1.0, tl.float32)
        if beta is not None:
            step = _per_position(beta, beta_strides, batch, head, begin, length, C)
        by_from_start = tl.zeros((C,), tl.float32)
        by_to_end = tl.zeros((C,), tl.float32)
        by_step = tl.zeros((C,), tl.float32)
        by_decay = 0.0
        by_weight = 0.0
        by_p = tl.zeros((C, C), tl.float32)
        for block in tl.static_range(BLOCKS):
            at = number * BLOCKS + block
            grad = load_positions(rows_of(by_out, by_out_strides, batch, head), begin, length, C, V, BV, block * BV)
            state = tl.load(block_pointers(states, at, BV, BK))
            by_state = tl.load(block_pointers(by_states, at, BV, BK))
            by_decay += tl.sum(tl.sum(state.to(tl.float32) * by_state.to(tl.float32), 1), 0)
            read = tl.dot(tl.trans(state), tl.trans(grad), input_precision=PRECISION) * (scale * from_start)[None, :]
            by_from_start += tl.sum(read * tl.trans(queries).to(tl.float32), 0)
            grad_q += read
            value = tl.load(block_pointers(values, at, BV, C))
            written = tl.dot(tl.trans(by_state), value, input_precision=PRECISION) * to_end[None, :]
            by_to_end += tl.sum(written * tl.trans(keys).to(tl.float32), 0)
            grad_k += written
            by_p = tl.dot(grad, value, by_p, input_precision=PRECISION)
            if not DELTA:
                by_value = tl.trans(tl.load(block_pointers(by_values, at, BV, C))).to(tl.float32)
                by_given = step[:, None] * by_value
                if beta is not None or skip is not None:
                    given = load_positions(rows_of(v, v_strides, batch, head), begin, length, C, V, BV, block * BV)
                    given = given.to(tl.float32)
                    by_step += tl.sum(by_value * given, 1)
                if skip is not None:
                    by_given += tl.load(skip + head).to(tl.float32) * grad.to(tl.float32)
                    by_weight += tl.sum(tl.sum(grad.to(tl.float32) * given, 1), 0)
                given_rows = rows_of(by_v, by_v_strides, batch, head)
                store_positions(given_rows, begin, length, by_given, C, V, BV, block * BV)
        if skip is not None:
            tl.store(by_skip + number, by_weight)
        # Each logarithm is in the sums up to later positions, in those after earlier ones, and in that of the chunk.
        by_logs = tl.cumsum(by_from_start, 0, reverse=True) + tl.cumsum(by_to_end, 0) - by_to_end + decay * by_decay
        by_between = by_p * tl.load(block_pointers(p, number, C, C)).to(tl.float32)
        if EXACT:
            later = near[:, None] > near[None, :]
            by_logs += tl.sum(tl.where(later, tl.cumsum(by_between, 0, reverse=True), 0.0), 1)
        else:
            by_logs += tl.cumsum(tl.sum(by_between, 1) - tl.sum(by_between, 0), 0, reverse=True)
            by_logs = tl.where(logs < _LOWEST, 0.0, by_logs)
        by_p = (by_p * (scale * _decays_between(logs, C, EXACT))).to(dtype)
        grad_q = tl.dot(tl.trans(keys), tl.trans(by_p), grad_q, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(queries), by_p, grad_k, input_precision=PRECISION)
        inside = begin + near < length
        offset = (batch.to(tl.int64) * heads + head) * length + begin
        tl.store(by_g + offset + near, by_logs.to(by_g.dtype.element_ty), mask=inside)
        if beta is not None and not DELTA:
            tl.store(by_beta + offset + near, by_step.to(by_beta.dtype.element_ty), mask=inside)

    offset = ((share * (tl.num_programs(0) // (splits * chunks)) + batch * groups + group).to(tl.int64) * length) * K
    store_positions((by_q + offset, K), begin, length, tl.trans(grad_q), C, K, BK)
    store_positions((by_k + offset, K), begin, length, tl.trans(grad_k), C, K, BK)


@triton.jit(do_not_specialize=SIZES)
def delta_gradients_kernel(
    k, k_strides, v, v_strides, g, g_strides, beta, beta_strides, ages, age_stride,
    t, w, u, states, by_values, part_of_k, part_of_g, by_k, by_v, by_v_strides, by_g, by_beta,
    length, chunks, heads, groups, splits,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk by way of t, w and u, and the sums with the results of `gradients_kernel`.

    The gradient of t, [j, i], is that of its transpose.
    """
    share, chunk, rest = locate(splits, chunks)
    group, batch = rest % groups, rest // groups
    begin, ratio = chunk * C, heads // groups
    near = tl.arange(0, C)
    later = near[None, :] > near[:, None]
    dtype = k.dtype.element_ty
    BLOCKS: tl.constexpr = (V + BV - 1) // BV

    keys = load_positions(rows_of(k, k_strides, batch, group), begin, length, C, K, BK)
    into_k = ((share * (tl.num_programs(0) // (splits * chunks)) + batch * groups + group).to(tl.int64) * length) * K
    grad_k = tl.zeros((BK, C), tl.float32)
    for member in range(share * ratio // splits, (share + 1) * ratio // splits):
        head = group * ratio + member
        number = (batch * heads + head) * chunks + chunk
        inverse = tl.load(block_pointers(t, number, C, C))
        step = _per_position(beta, beta_strides, batch, head, begin, length, C)
        by_w = tl.zeros((BK, C), tl.float32)
        by_t = tl.zeros((C, C), tl.float32)
        by_step = tl.zeros((C,), tl.float32)
        for block in tl.static_range(BLOCKS):
            at = number * BLOCKS + block
            by_value = tl.load(block_pointers(by_values, at, BV, C))
            state = tl.load(block_pointers(states, at, BV, BK))
            by_w = tl.dot(tl.trans(state), by_value, by_w, input_precision=PRECISION)
            y = tl.dot(by_value, inverse, input_precision=PRECISION)
            solved = tl.load(block_pointers(u, at, BV, C))
            by_t = tl.dot(tl.trans(solved), y.to(dtype), by_t, input_precision=PRECISION)
            given = load_positions(rows_of(v, v_strides, batch, head), begin, length, C, V, BV, block * BV)
            by_step += tl.sum(y * tl.trans(given).to(tl.float32), 0)
            given_rows = rows_of(by_v, by_v_strides, batch, head)
            store_positions(given_rows, begin, length, tl.trans(y * step[None, :]), C, V, BV, block * BV)

        logs = _log_decays(g, g_strides, ages, age_stride, batch, head, begin, length, C)
        from_start, _, _ = _decays(logs, C, EXACT)
        z = tl.dot((-by_w).to(dtype), inverse, input_precision=PRECISION)
        erased = tl.load(block_pointers(w, number, C, BK))
        by_t = tl.dot(erased, z.to(dtype), by_t, input_precision=PRECISION)
        by_erased = from_start * tl.sum(z * tl.trans(keys).to(tl.float32), 0)
        grad_k += z * (step * from_start)[None, :]
        k_k = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        by_system = tl.where(later, -_decays_between(logs, C, EXACT, 1) * by_t, 0.0)
        by_between = by_system * k_k
        by_step += by_erased + tl.sum(by_between, 0)
        by_between *= step[None, :]
        by_logs = tl.cumsum(step * by_erased, 0, reverse=True)
        if EXACT:
            by_logs += tl.sum(tl.where(later, tl.cumsum(by_between, 1, reverse=True), 0.0), 0)
        else:
            by_logs += tl.cumsum(tl.sum(by_between, 0) - tl.sum(by_between, 1), 0, reverse=True)
            by_logs = tl.where(logs < _LOWEST, 0.0, by_logs)
        by_system = (by_system * step[None, :]).to(dtype)
        grad_k = tl.dot(tl.trans(keys), by_system, grad_k, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(keys), tl.trans(by_system), grad_k, input_precision=PRECISION)
        inside = begin + near < length
        offset = (batch.to(tl.int64) * heads + head) * length + begin
        by_logs += tl.load(part_of_g + offset + near, mask=inside, other=0.0)
        tl.store(by_g + offset + near, by_logs.to(by_g.dtype.element_ty), mask=inside)
        tl.store(by_beta + offset + near, by_step.to(by_beta.dtype.element_ty), mask=inside)
    part = load_positions((part_of_k + into_k, K), begin, length, C, K, BK)
    store_positions((by_k + into_k, K), begin, length, tl.trans(grad_k) + part, C, K, BK)


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
    k = rows_of(k, k_strides, batch, group)
    if out is not None:
        q = rows_of(q, q_strides, batch, group)
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
            queries = load_positions(q, begin, length, C, K, BK)
            mix = tl.load(block_pointers(p, number, C, C))
            result = tl.dot(low, tl.trans(queries), input_precision=PRECISION) * from_start[None, :]
            result = tl.dot(value.to(dtype), tl.trans(mix), result, input_precision=PRECISION)
            row, column = begin + tl.arange(0, C), tl.arange(0, BV)
            there = (row < length)[:, None] & (block * BV + column < V)[None, :]
            rows = tile_pointers(out, out_strides[2], begin, C, BV)
            result = tl.trans(result)
            if skip is not None:
                given = tl.load(tile_pointers(v, v_strides[2], begin, C, BV), mask=there, other=0.0)
                result += weight * given.to(tl.float32)
            tl.store(rows, result.to(out.dtype.element_ty), mask=there)
            from_start = next_from_start
        keys = load_positions(k, begin, length, C, K, BK)
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
    """The gradient of the state before all chunks, from the gradients of outputs and the last state, `by_final`, or 0.

    `by_states` [.., V, K] has the gradients of the states after every chunk, and `by_values` [.., V, C] the gradients
    of what it wrote; None if nobody reads them.
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
    k, q = rows_of(k, k_strides, batch, group), rows_of(q, q_strides, batch, group)
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
        keys = load_positions(k, begin, length, C, K, BK)
        queries = load_positions(q, begin, length, C, K, BK)
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
