"""All-gather + GEMM in one persistent Hopper kernel (Flux 3.2; engine: `hopper_gemm.py`).

Contract
  x_own      [t, K] of this rank; read by its own descriptor, so it needs no copy into the slot
  gathered   [W, c, K] of the own slot; peers' copy engines fill shard s, then set flag [s, chunk]
  order      shards rank, rank + 1, ...: what arrives last is needed last
  gate       the producer warp waits, before the first load of a tile, for the flag of the last
             chunk that the tile's rows touch (chunks of a shard arrive in order)
  clearing   the last program to finish waits for every flag and clears it, so that a shard which
             no tile touched is accounted for too
  deadlock   no program waits for another program, only for copy engines: the grid may be larger
             or smaller than the SMs. Copies are enqueued before the launch.

Where BLOCK_M does not divide c (`STRADDLE`), tiles cover rows of two shards: one grid over all
[W * c] rows, rotated to begin at the own shard, which is then read from the slot too.

One file of more than 300 lines: the two roles and the order of tiles are read together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.arena import Arena, Slot
from megascale.flux.signals import wait_flag
from megascale.flux.tiles import ceil_div
from megascale.kernels.driver import current_stream
from megascale.kernels.hopper_gemm import (
    CONSUMER_WARPS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    accumulator_layout,
    add_bias,
    descriptor,
    fence_async_global,
    make_ring,
    store_tile,
    tile_in_shard,
    weight_descriptor,
)
from megascale.kernels.kernel_call import MOST_CALLS, KernelCall, loaded
from megascale.kernels.remembered import Remembered


@aggregate
class Grid:
    """The tiles of a call in their order (protocol.py), as one value. Rows are of x."""

    rank: gl.tensor
    tiles_m: gl.tensor  # of a shard; STRADDLE: of all rows
    tiles_n: gl.tensor
    shard_rows: gl.tensor
    chunk_rows: gl.tensor
    num_rows: gl.tensor
    k_steps: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP_M: gl.constexpr
    WORLD: gl.constexpr
    CHUNKS: gl.constexpr
    STRADDLE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rank, tiles_m, tiles_n, shard_rows, chunk_rows, num_rows, k_steps,
        BLOCK_M, BLOCK_N, GROUP_M, WORLD, CHUNKS, STRADDLE,
    ):  # fmt: skip
        self.rank = rank
        self.tiles_m = tiles_m
        self.tiles_n = tiles_n
        self.shard_rows = shard_rows
        self.chunk_rows = chunk_rows
        self.num_rows = num_rows
        self.k_steps = k_steps
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.WORLD = gl.constexpr(WORLD)
        self.CHUNKS = gl.constexpr(CHUNKS)
        self.STRADDLE = gl.constexpr(STRADDLE)

    @gluon.jit
    def num_own(self):
        """Tiles that come first and wait for nothing: those of the own shard."""
        if self.STRADDLE:
            return gl.to_tensor(0)
        else:  # noqa: RET505 - a branch at compile time
            return self.tiles_m * self.tiles_n

    @gluon.jit
    def num_tiles(self):
        if self.STRADDLE:
            return self.tiles_m * self.tiles_n
        else:  # noqa: RET505
            return self.tiles_m * self.tiles_n * self.WORLD

    @gluon.jit
    def at(self, t):
        """(shard, row within it, row, column) of tile number t; STRADDLE: the shard is 0."""
        per_grid = self.tiles_m * self.tiles_n
        m, n = tile_in_shard(t % per_grid, self.tiles_m, self.tiles_n, self.GROUP_M)
        if self.STRADDLE:
            own = (self.rank * self.shard_rows + self.BLOCK_M - 1) // self.BLOCK_M
            row = (m + own) % self.tiles_m * self.BLOCK_M
            return gl.to_tensor(0), row, row, n * self.BLOCK_N
        else:  # noqa: RET505
            shard = (self.rank + t // per_grid) % self.WORLD
            local = m * self.BLOCK_M
            return shard, local, shard * self.shard_rows + local, n * self.BLOCK_N

    @gluon.jit
    def flag_of(self, row):
        """The flag which says that this row has arrived."""
        shard = row // self.shard_rows
        return shard * self.CHUNKS + row % self.shard_rows // self.chunk_rows


@gluon.jit
def _produce(
    own_desc,
    gathered_desc,
    weight_desc,
    flags_ptr,
    done_ptr,
    report_ptr,
    grid,
    ring,
    CLEAR: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    stage = 0
    phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    num_own = grid.num_own()
    for t in range(program, num_own, programs):
        _, local, _, column = grid.at(t)
        stage, phase = ring.load(
            own_desc, weight_desc, local, column, 0, grid.k_steps, stage, phase
        )
    first = program + (num_own - program + programs - 1) // programs * programs
    gate = -1  # the last flag that was seen
    for t in range(first, grid.num_tiles(), programs):
        shard, local, row, column = grid.at(t)
        if grid.STRADDLE:
            last_row = gl.minimum(row + grid.BLOCK_M, grid.num_rows) - 1
            for flag in range(grid.flag_of(row), grid.flag_of(last_row) + 1):
                source = flag // grid.CHUNKS
                if source != grid.rank:
                    wait_flag(flags_ptr + flag, report_ptr, source, t, DEADLINE_NS)
            fence_async_global()
        else:
            last_row = gl.minimum(local + grid.BLOCK_M, grid.shard_rows) - 1
            needed = shard * grid.CHUNKS + last_row // grid.chunk_rows
            if needed != gate:
                wait_flag(flags_ptr + needed, report_ptr, shard, t, DEADLINE_NS)
                fence_async_global()
                gate = needed
        stage, phase = ring.load(
            gathered_desc, weight_desc, row, column, 0, grid.k_steps, stage, phase
        )
    if CLEAR:
        ticket = gl.atomic_add(done_ptr, 1)
        if ticket == programs - 1:
            for flag in range(grid.WORLD * grid.CHUNKS):
                source = flag // grid.CHUNKS
                if source != grid.rank:
                    wait_flag(flags_ptr + flag, report_ptr, source, -1, DEADLINE_NS)
                    gl.thread_barrier()  # every thread has seen it
                    gl.store(flags_ptr + flag, 0)
            gl.store(done_ptr, 0)


@gluon.jit
def _consume(out_desc, bias_ptr, num_columns, grid, ring, c_tile, HAS_BIAS: gl.constexpr):
    stage = 0
    phase = 0
    ACC: gl.constexpr = accumulator_layout(grid.BLOCK_N)
    for t in range(gl.program_id(0), grid.num_tiles(), gl.num_programs(0)):
        _, _, row, column = grid.at(t)
        acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = ring.multiply(acc, 0, grid.k_steps, stage, phase)
        if HAS_BIAS:
            acc = add_bias(acc, bias_ptr, column, num_columns, grid.BLOCK_N, ACC)
        tma.store_wait(0)
        gl.thread_barrier()
        store_tile(out_desc, row, column, acc, c_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rank"])
def all_gather_gemm_hopper(
    own_desc,
    gathered_desc,
    weight_desc,
    out_desc,
    bias_ptr,
    flags_ptr,
    done_ptr,
    report_ptr,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    chunk_rows,
    num_rows,
    k_steps,
    num_columns,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    CHUNKS: gl.constexpr,
    KN: gl.constexpr,
    STRADDLE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CLEAR: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    """At most one program an SM; see the module."""
    C: gl.constexpr = out_desc.block_shape
    grid = Grid(
        rank,
        gl.to_tensor(tiles_m),
        gl.to_tensor(tiles_n),
        gl.to_tensor(shard_rows),
        gl.to_tensor(chunk_rows),
        gl.to_tensor(num_rows),
        gl.to_tensor(k_steps),
        C[0],
        C[1],
        GROUP_M,
        WORLD,
        CHUNKS,
        STRADDLE,
    )
    ring = make_ring(own_desc, weight_desc, KN, STAGES)
    c_tile = gl.allocate_shared_memory(out_desc.dtype, C, out_desc.layout)
    gl.warp_specialize(
        [
            (_consume, (out_desc, bias_ptr, num_columns, grid, ring, c_tile, HAS_BIAS)),
            (
                _produce,
                (
                    own_desc,
                    gathered_desc,
                    weight_desc,
                    flags_ptr,
                    done_ptr,
                    report_ptr,
                    grid,
                    ring,
                    CLEAR,
                    DEADLINE_NS,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


_calls: Remembered[tuple[Any, ...], KernelCall] = Remembered(MOST_CALLS)


def launch(
    x_own: Tensor,
    gathered_WcK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot | None,
    arena: Arena,
    config: Any,
    layout: str,
    num_rows: int,
    *,
    clear: bool = True,
) -> None:
    """Launch on the current stream. `out` is [num_rows, N]; all tensors are contiguous.

    A slot of None is one rank: the plain GEMM of x_own, for comparison.
    """
    prepared(
        x_own, gathered_WcK, weight, bias, out, slot, arena, config, layout, num_rows, clear=clear
    )()


def prepared(
    x_own: Tensor,
    gathered_WcK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot | None,
    arena: Arena,
    config: Any,
    layout: str,
    num_rows: int,
    *,
    clear: bool = True,
) -> Callable[[], None]:
    """What `launch` with these launches: compiled and loaded here, before rows are pushed."""
    world = 1 if slot is None else slot.world_size
    flags = arena.done if slot is None else slot.flags[slot.rank]
    x_first = x_own if x_own.shape[0] else gathered_WcK  # no own rows: any address will do
    added = out if bias is None else bias
    key = (
        num_rows, weight.shape, x_own.shape, x_own.dtype, layout, world, config, bias is None,
        clear, arena.rank, arena.num_sms, arena.deadline_ns, x_own.device,
    )  # fmt: skip
    tensors = (x_first, gathered_WcK, weight, out, added, flags, arena.done, arena.report)
    call = _calls.get(key)
    if call is None or added.data_ptr() % 16:
        return _made(key, tensors, bias, arena, config, layout, num_rows, world, clear)
    return lambda: call.launch(current_stream(out.device.index), tensors)


def _made(
    key: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    bias: Tensor | None,
    arena: Arena,
    config: Any,
    layout: str,
    num_rows: int,
    world: int,
    clear: bool,
) -> Callable[[], None]:
    """The launch of a kernel that is compiled now and remembered, if 16 bytes divide the addresses.

    Else it is Triton's own, of a kernel for such addresses.
    """
    x_first, gathered_WcK, weight, out, added, flags, done, report = tensors
    columns = weight.shape[0] if layout == "NK" else weight.shape[1]
    tiles_n = ceil_div(columns, config.block_n)
    rank = 0 if world == 1 else arena.rank
    grid = GatherTiles(
        num_rows, world, rank, config.block_m, tiles_n, config.group_m, config.chunks
    )
    a_block = (config.block_m, config.block_k)
    gathered = gathered_WcK.view(-1, gathered_WcK.shape[-1])
    own = x_first.view(-1, x_first.shape[-1])
    arguments = {
        "own_desc": descriptor(own, a_block),
        "gathered_desc": descriptor(gathered, a_block),
        "weight_desc": weight_descriptor(weight, layout, config.block_n, config.block_k),
        "out_desc": descriptor(out, (config.block_m, config.block_n)),
        "bias_ptr": added,
        "flags_ptr": flags,
        "done_ptr": done,
        "report_ptr": report,
        "rank": rank,
        "tiles_m": grid.tiles_m,
        "tiles_n": tiles_n,
        "shard_rows": grid.rows_per_rank,
        "chunk_rows": grid.rows_per_chunk,
        "num_rows": num_rows,
        "k_steps": ceil_div(gathered.shape[1], config.block_k),
        "num_columns": columns,
    }
    programs = min(arena.num_sms, grid.num_tiles)
    constants = {
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "WORLD": world,
        "CHUNKS": grid.num_chunks,
        "KN": layout == "KN",
        "STRADDLE": grid.straddling,
        "HAS_BIAS": bias is not None,
        "CLEAR": clear and world > 1,
        "DEADLINE_NS": arena.deadline_ns,
        "num_warps": CONSUMER_WARPS.value,
    }
    compiled = loaded(all_gather_gemm_hopper, out.device, arguments, constants)
    if added.data_ptr() % 16:
        return partial(all_gather_gemm_hopper[(programs,)], **arguments, **constants)
    call = _calls[key] = KernelCall(compiled, arguments, programs)
    return lambda: call.launch(current_stream(out.device.index), tensors)
