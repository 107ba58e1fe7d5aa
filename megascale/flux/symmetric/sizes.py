"""Which transport and how many programs, by size: pure arithmetic, the same on all ranks.

| transport | data | announced by | used |
|---|---|---|---|
| in band | the slot's flag words | itself: no word of it is zero | few bytes: see below |
| flags | the slot's data | a flag a piece, set by the kernel | up to COPY_ENGINE_BYTES a peer |
| copy engine | the slot's data | a flag a peer or chunk, copied behind it | above |

That is what is used without a measurement; the tuner times in band against flags where both can be
(`config.py`).

A kernel reaches 343-350 GB/s over a link from 8 blocks on and a copy engine 389 (256 MiB, H200),
but each of its copies costs some microseconds first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

# That a rank receives. Sums in one hop were measured against flags as far as a slot has words: in
# band takes 0.87 to 1.01 of their time with the GEMM before them (2x H200, 128 KB to 4 MB).
IN_BAND_BYTES = 256 << 10
ONE_HOP_IN_BAND_BYTES = 4 << 20
COPY_ENGINE_BYTES = 16 << 20  # to each peer
TWO_SHOT_BYTES = 700_000  # what a link moves in the time of one hop: 2 us at 350 GB/s
MAX_PROGRAMS = 128  # all resident on 132 SMs, at any register count
CHUNK_BYTES = 16 << 20  # of a copy: smaller ones pay the engine's ramp, larger ones wait for a sum
MAX_CHUNKS = 4
_VECTOR_BYTES = 16
_THREADS = 32
_WARPS_BY_FLAGS = 16


@dataclass(frozen=True)
class Pieces:
    """How a kernel divides a share. Each program of a round has a piece: `blocks` of `block`."""

    block: int
    warps: int
    programs: int
    rounds: int
    blocks: int  # of a piece
    pushers: int = 0  # programs that only send, where the others only sum

    @property
    def options(self) -> dict[str, int]:
        """Constants of a launch that every kernel takes."""
        return {"BLOCK": self.block, "num_warps": self.warps}

    @property
    def rounds_of(self) -> dict[str, int]:
        """Arguments of the kernels that work in rounds."""
        return {"num_rounds": self.rounds, "blocks_a_round": self.blocks}

    @property
    def roles_of(self) -> dict[str, int]:
        """Arguments of the kernel whose programs send or sum."""
        return {"num_blocks": self.blocks, "pushers": self.pushers}


def padded(elements: int) -> int:
    """Elements of a part in memory: a multiple of 16, which the kernels' alignment rests on."""
    return -(-max(elements, 1) // 16) * 16


def fits_in_band(elements: int, word_bytes: int, parts: int, flag_words: int) -> bool:
    """Whether `parts` parts of `elements` words fit into a slot's flag words."""
    return parts * padded(elements) * word_bytes <= flag_words * 4


def goes_in_band(
    elements: int, word_bytes: int, parts: int, flag_words: int, limit_bytes: int = IN_BAND_BYTES
) -> bool:
    """Whether they travel there where nothing was measured."""
    return fits_in_band(elements, word_bytes, parts, min(flag_words, limit_bytes // 4))


def programs_of(num_sms: int) -> int:
    """The most that a kernel here may have, all resident: it may fill so many SMs."""
    return max(2, min(MAX_PROGRAMS, num_sms))


@cache
def in_band_pieces(elements: int, word_bytes: int, most: int = MAX_PROGRAMS) -> Pieces:
    """One block a program: small blocks while that gives enough programs, since they start and end
    sooner; larger ones beyond `most`, then several a program."""
    block = 128 * _VECTOR_BYTES // word_bytes  # 4 warps, one access of 16 bytes a thread
    warps = 4
    while warps < 16 and -(-elements // block) > most:
        block, warps = 2 * block, 2 * warps
    num_blocks = max(1, -(-elements // block))
    blocks = -(-num_blocks // most)
    return Pieces(block, warps, -(-num_blocks // blocks), 1, blocks)


@cache
def flag_pieces(
    elements: int,
    element_bytes: int,
    flags_each: int,
    flag_words: int,
    most: int = MAX_PROGRAMS,
) -> Pieces:
    """Up to `most` programs, in rounds of a few blocks each.

    flags_each  flags that a piece needs at a receiver (sources, times phases)
    """
    block = _block_by_flags(element_bytes)
    num_blocks = max(1, -(-elements // block))
    programs = min(num_blocks, most)
    per_program = -(-num_blocks // programs)
    blocks = min(per_program, 4)
    while -(-per_program // blocks) * programs * flags_each > flag_words:
        blocks *= 2
    return Pieces(block, _WARPS_BY_FLAGS, programs, -(-per_program // blocks), blocks)


def roles_fit(elements: int, element_bytes: int, sources: int, flag_words: int) -> bool:
    """Whether a flag a source and block is no more than a slot has."""
    return sources * -(-elements // _block_by_flags(element_bytes)) <= flag_words


@cache
def role_pieces(
    elements: int, element_bytes: int, pushers: int, most: int = MAX_PROGRAMS
) -> Pieces:
    """`pushers` of `most` programs send, and of the others there is at most one a block."""
    pushers = min(pushers, most // 2)
    block = _block_by_flags(element_bytes)
    num_blocks = max(1, -(-elements // block))
    programs = pushers + min(num_blocks, most - pushers)
    return Pieces(block, _WARPS_BY_FLAGS, programs, 1, num_blocks, pushers)


def _block_by_flags(element_bytes: int) -> int:
    """Two accesses of 16 bytes a thread."""
    return 2 * _WARPS_BY_FLAGS * _THREADS * _VECTOR_BYTES // element_bytes


def shots(num_bytes: int, world_size: int) -> int:
    """1 or 2 hops of an all-reduce of `num_bytes`: the second pays where it saves link time."""
    # (W - 1) S against 2 (W - 1) / W * S and one hop more; never of two ranks
    saved = num_bytes * (world_size - 1) * (world_size - 2) // world_size
    return 2 if saved > TWO_SHOT_BYTES else 1


def chunks(share_bytes: int, rows: int) -> int:
    """Parts in which copy engines send a share, so that the sum of one runs beside the next."""
    return max(1, min(MAX_CHUNKS, share_bytes // CHUNK_BYTES, rows))
