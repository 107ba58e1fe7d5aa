"""GEMM + reduce-scatter, reduced in flight: tiles are added up at their owner as they come, in one
buffer of one shard (Flux 3.1, Reduce in place of Write; its `fuse_reduction`). An option.

Contract. As of GEMM + reduce-scatter, and
  memory  symmetric memory of a call is one shard [c, N]; where tiles have places of their own
          (`gemm_reduce_scatter/hopper.py`) it is W of them
  sum     ranks r + W - 1, ..., r + 1 add their tiles to one in the owner's memory, one after the
          other, each sum rounded to the type of x; the owner r adds its own partial and the bias in
          fp32 and rounds once more. Equal on every call, bit by bit. The other forms add all
          received tiles in fp32; here W - 2 roundings come on top, as in a ring. With two ranks
          nothing is added in memory: same bits as the fused form of the same tiles
  order   the destinations of a rank are rank + 1, ..., rank, as in the fused form. So owner r is
          the first destination of r - 1, the second of r - 2, and so on, and its tile comes by all
          ranks in that order anyway. It is a *relay*: the first stores the tile, nothing else;
          whoever has stored or added it tells the next, whose turn it is, by a flag in the next
          one's memory. That is always the left neighbour, rank - 1: the last of them is the owner

**Why a relay, and not addition by whoever comes**, which is what `fuse_reduction` is elsewhere:
- Nothing has to be zero before. Memory of a slot holds what other calls have left: it would take a
  memset of the shard at the beginning of a call, a word to every peer that it is done, and a wait
  for the owner in every program before its first tile.
- Results repeat. Added as they come, bf16 sums of three and more ranks differ from call to call.
- One writer at a time, so an addition need not be atomic between GPUs. Those of TMA, the fast ones,
  are not by the memory model (relaxed at the scope of one GPU); bf16 atomics of sm_80 are loops of
  compare-and-swap, of that scope too.
- A flag is set once and waited for once, like every flag here. Counting arrivals in a word would
  save flags, W - 2 of W - 1 a tile, and make all senders write to one.
What it costs: a tile waits for its predecessor's, made one shard's time earlier; a rank that is
late by more than that holds up others, which wait for its rows in the end anyway. A shard with less
than a tile for every SM waits W - 2 times for the way over the link.

**Why off by default**: it rounds more, and the link carries the same bytes. It saves memory, and
the owner reads one tile where it read W - 1; what that is in time has not been measured.

Turns of slots (`arena.py`) hold: a call completes on a rank when the tiles of its own shard have
come, to which every peer has added, and so begun the call; also on a rank without rows. A flag is
set by the right neighbour in the call in which it is reset. (tests/flux/relays.py searches all
interleavings, with calls of other forms between.)

protocol.py  who does what when, in integers; config.py, launch.py; kernel.py  the portable kernel;
hopper.py, hopper_launch.py  the one for sm_90
"""
