"""Stage 1 of a checkpoint: slots in host memory that outlive the trainer (MegaScale 4.4).

slots = MemorySlots(prefix, counted, copies, mesh, ranks, identity=..., epoch=..., device=...)
stamp = slots.restore(newer_than)    # fills the pieces, or None
slots.prepare()                      # begins to make room, behind training
slots.begin(step, consumed_samples)  # copies; `settled()` when the step's values are good
staged = slots.hold()                # that state, for whoever writes it to a storage
slots.before_update()                # before anything changes the state
"""

from __future__ import annotations

from megascale.checkpoint.memory.bring import HalfRestoredError
from megascale.checkpoint.memory.pacing import PageSignal
from megascale.checkpoint.memory.slot import Stamp
from megascale.checkpoint.memory.slots import MemorySlots

__all__ = ["HalfRestoredError", "MemorySlots", "PageSignal", "Stamp"]
