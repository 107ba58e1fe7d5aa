"""The GEMM of few rows and its communication in one kernel: the form "few_rows" (decode).

With few rows a GEMM reads its weight once and does little else: the time is that of memory (67 to
604 MB at 4.3 TB/s), and a collective behind it is latency. So the weight is streamed at full
bandwidth, and the exchange begins in the epilogue of the same kernel, without a launch between.

- **GEMM + all-reduce, GEMM + reduce-scatter**: the epilogue of a tile pushes the partial values to
  all peers (or each owner's rows to the owner), then the program sums its tile of all ranks.
- **all-gather + GEMM**: the first programs push their part of the own rows to all peers while all
  prefetch the weight into the L2 cache; then they wait for the rows and multiply.

Two ways to push partial values (`symmetric/kernel.py`): in band while the slot's flag words hold
them, else flags.

**Split-K** fills the device where there are fewer tiles than SMs. A program stores its partial tile
in fp32 (in the own slot, L2-resident), adds to the tile's ticket, and waits until all splits have;
then each of them reduces, pushes and sums its own share of the columns, in split order. So the tail
is divided among the splits, and the result does not depend on who was last.

**No deadlock.** Programs wait (1) for the splits of a tile, which programs of the same grid store
before they wait for anything; all of them run at once, because the grid is at most SMs x occupancy
of the compiled kernel; (2) for the same piece from the same program of all peers, or for pushed
rows, which again are sent before the peers wait for anything of others than their own splits.

In the interpreter programs run one after another. There the kernel is launched in phases, each of
which ends before what the next one waits for.

Files: `config.py` (for the tuner), `kernel.py` and `launch.py` (what both kernels share), `summed/`
and `gathered/` (a kernel each); the forms are `few_rows.py` of each operator.
"""
