"""The producer of the dense forward in Gluon: one warp that decides which keys a work tile needs.

It lets the copy engine fetch queries, keys, values and states into shared memory, a few tiles ahead. See
`gluon_forward`.
"""

# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnmesh.ops.dense.gluon_alibi import ROWS
from attnmesh.ops.dense.gluon_state import NEW
from attnmesh.ops.dense.gluon_tile_scheduler import CONSUMERS, key_phases, locate, publish

_ROWS, _CONSUMERS, _NEW = gl.constexpr(ROWS), gl.constexpr(CONSUMERS), gl.constexpr(NEW)


@gluon.jit
def load(q_blocks, k_blocks, v_blocks, state_blocks, memory, barriers, mask, sizes, alibi, SHAPE: gl.constexpr):
    """Publishes a record for each work tile and each part of its mask, and fetches the keys and values of the part."""
    KEYS: gl.constexpr = SHAPE.keys
    STAGES: gl.constexpr = SHAPE.stages
    PARTS: gl.constexpr = 1 if SHAPE.parts == 0 else SHAPE.parts
    step = 0  # tiles of keys so far, of all work tiles
    record = 0  # records so far
    served = 0  # work tiles so far that see any key
    count = 0  # work tiles so far
    _, q_positions, k_positions, _ = alibi
    near = gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    program, programs = gl.program_id(0), gl.num_programs(0)
    wave, work_tile = 0, program
    while work_tile < sizes.work_tiles:
        row_begin, head, batch = locate(work_tile, sizes, SHAPE)
        row_stop = gl.minimum(row_begin + _CONSUMERS * _ROWS // SHAPE.pack, sizes.q_len)
        kv_head = head // sizes.group
        if memory.distances is not None:
            origin = gl.load(q_positions + row_begin)
        fetched = served  # and one more as soon as the queries are fetched, which needs a key to be seen
        for part in range(PARTS):
            begin, inner, edge, stop = key_phases(mask, part, batch, row_begin, row_stop, sizes, SHAPE)
            publish(memory.work, barriers, record, (row_begin, head, batch, begin, inner, edge, stop))
            record += 1
            if memory.distances is not None:
                positions = gl.load(k_positions + (begin + near), mask=begin + near < sizes.kv_len, other=0)
            for tile in range((stop - begin + KEYS - 1) // KEYS):
                at = begin + tile * KEYS
                _fetch(k_blocks, memory.k, barriers.k_ready, barriers.k_free, batch, kv_head, at, step)
                if memory.distances is not None:
                    memory.distances.index(step % (STAGES + 1)).store((positions - origin).to(gl.float32))
                    mbarrier.arrive(barriers.k_ready.index(step % STAGES), count=1)
                    following = at + KEYS + near  # which arrive by the time they are needed
                    positions = gl.load(k_positions + following, mask=following < sizes.kv_len, other=0)
                # After the first keys, which may arrive while the last products still read the queries before.
                if fetched == served:
                    for consumer in gl.static_range(_CONSUMERS):
                        mbarrier.wait(barriers.q_free.index(consumer), (served & 1) ^ 1)
                        row = row_begin + consumer * (_ROWS // SHAPE.pack)
                        _copy(q_blocks, memory.q, barriers.q_ready.index(consumer), [batch, head, row, 0], consumer)
                    fetched += 1
                # The values of a tile are needed after the keys of the next tile.
                if tile > 0:
                    _fetch(v_blocks, memory.v, barriers.v_ready, barriers.v_free, batch, kv_head, at - KEYS, step - 1)
                step += 1
            if stop > begin:
                last = begin + (stop - begin - 1) // KEYS * KEYS
                _fetch(v_blocks, memory.v, barriers.v_ready, barriers.v_free, batch, kv_head, last, step - 1)
        served = fetched
        # Not sooner: the copy engine may still store the earlier state, for which keys must not wait.
        if SHAPE.staged and SHAPE.state != _NEW:
            for consumer in gl.static_range(_CONSUMERS):
                mbarrier.wait(barriers.state_free.index(consumer), count & 1)
                row = row_begin + consumer * (_ROWS // SHAPE.pack)
                _copy(state_blocks, memory.state, barriers.state_ready.index(consumer), [batch, head, row, 0], consumer)
        count += 1
        # Work tiles become shorter: in every other wave in the opposite order, so that all programs get the same
        # amount.
        wave += 1
        work_tile = wave * programs + gl.where(wave % 2 == 0, program, programs - 1 - program)
    publish(memory.work, barriers, record, (-1, 0, 0, 0, 0, 0, 0))


@gluon.jit
def _fetch(blocks, memory, ready, free, batch, head, row, step):
    """Lets the copy engine fetch the tile of keys or values that begins at `row`, as soon as its stage is free."""
    STAGES: gl.constexpr = memory[0].shape[0]
    stage = step % STAGES
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    _copy(blocks, memory, ready.index(stage), [batch, head, row, 0], stage)


@gluon.jit
def _copy(blocks, memory, ready, coord, stage):
    rest: gl.constexpr = 0 if blocks[1] is None else blocks[1].block_type.nbytes
    mbarrier.expect(ready, blocks[0].block_type.nbytes + rest)
    for i in gl.static_range(len(memory)):
        tma.async_copy_global_to_shared(blocks[i], coord, ready, memory[i].index(stage))
