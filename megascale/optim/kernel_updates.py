"""A step on flats by one Triton kernel a pass (`kernel.py`): at memory speed, without host waits.

A step moves 34 bytes a parameter under AdamW with bf16 parameters (4 for the norm, 30 for the
update), where torch's operations took 50: squares, scaling in place, fused AdamW, rounding to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.kernels.kernel_call import launch
from megascale.optim.segments import Flat
from megascale.optim.tiles import Tiles
from megascale.optim.updates import Moments, StepScalars

BLOCK = 1024  # elements a program at a time: 8 a thread, four independent loads of 32 bytes
NUM_WARPS = 4


class KernelUpdates:
    """`Updates` in kernels, for fp32 flats. `tiles` are those of `flats`."""

    def __init__(
        self, cfg: OptimizerConfig, flats: Sequence[Flat], moments: Moments, tiles: Tiles
    ) -> None:
        self.flats, self.moments, self.tiles = flats, moments, tiles
        self._betas = {"BETA1": cfg.beta1, "BETA2": cfg.beta2, "EPS": cfg.eps}
        self._sums = torch.zeros(
            2, tiles.num_slots, dtype=torch.float64, device=flats[0].master.device
        )
        self._summed: set[int] = set()  # flats whose squares of this step are in `_sums`

    def gradient_is_final(self, flat: int) -> None:
        """Sum its squares now: beside collectives that are still reducing others."""
        tiles = self.tiles.flats[flat]
        from megascale.optim import kernel

        self._launch(
            kernel.squares_kernel,
            len(tiles.table),
            {"x_ptr": self.flats[flat].grad, "tiles_ptr": tiles.table, "sums_ptr": self._sums},
            ALIGNED=tiles.aligned,
        )
        self._summed.add(flat)

    def gradient_squares(self) -> Tensor:
        for flat in range(len(self.flats)):
            if flat not in self._summed:
                self.gradient_is_final(flat)
        self._summed.clear()
        return self._sum_tiles(1)[0]

    def begin(self, scalars: StepScalars) -> None:
        """One small vector for all kernels, computed in fp64."""
        steps = self.moments.step_count.double() + 1.0
        first, second = (
            1.0 - torch.pow(beta, steps) for beta in (self._betas["BETA1"], self._betas["BETA2"])
        )
        lr = torch.zeros_like(steps) + scalars.lr
        values = [1.0 - scalars.found_inf, scalars.scale, lr, 1.0 / first, second.rsqrt()]
        self._scalars = torch.stack([value.double() for value in values]).float()

    def adamw(self, flat: int, weight_decay: float) -> None:
        from megascale.optim import kernel

        size = self.flats[flat].master.numel()
        arguments = {**self._state(flat), "parameters_ptr": self.flats[flat].parameters}
        self._launch(
            kernel.adamw_kernel,
            -(-size // BLOCK),
            {**arguments, "scalars_ptr": self._scalars, "size": size},
            **self._betas,
            DECAY=weight_decay,
        )

    def lamb_update(self, flat: int, weight_decay: float) -> None:
        from megascale.optim import kernel

        tiles = self.tiles.flats[flat]
        arguments = {
            **self._state(flat),
            "scalars_ptr": self._scalars,
            "tiles_ptr": tiles.table,
            "sums_ptr": self._sums,
            "slots": self.tiles.num_slots,
        }
        self._launch(
            kernel.lamb_update_kernel,
            len(tiles.table),
            arguments,
            **self._betas,
            DECAY=weight_decay,
            ALIGNED=tiles.aligned,
        )

    def lamb_squares(self) -> Tensor:
        return self._sum_tiles(2)

    def lamb_apply(self, flat: int, ratios: Tensor) -> None:
        from megascale.optim import kernel

        tiles, of = self.tiles.flats[flat], self.flats[flat]
        arguments = {
            "master_ptr": of.master,
            "update_ptr": of.grad,
            "parameters_ptr": of.parameters,
            "scalars_ptr": self._scalars,
            "tiles_ptr": tiles.table,
            "ratios_ptr": ratios.float(),
        }
        self._launch(kernel.lamb_apply_kernel, len(tiles.table), arguments, ALIGNED=tiles.aligned)

    def _state(self, flat: int) -> dict[str, Tensor]:
        return {
            "master_ptr": self.flats[flat].master,
            "grad_ptr": self.flats[flat].grad,
            "m_ptr": self.moments.exp_avg[flat],
            "v_ptr": self.moments.exp_avg_sq[flat],
        }

    def _sum_tiles(self, rows: int) -> Tensor:
        from megascale.optim import kernel

        names = len(self.tiles.bounds) - 1
        out = self._sums.new_empty(rows, names)
        arguments = {
            "sums_ptr": self._sums,
            "bounds_ptr": self.tiles.bounds,
            "out_ptr": out,
            "slots": self.tiles.num_slots,
            "names": names,
        }
        self._launch(kernel.sum_tiles_kernel, rows * names, arguments)
        return out

    def _launch(
        self, kernel: Any, programs: int, arguments: dict[str, Any], **constants: Any
    ) -> None:
        if programs:
            options = {**constants, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
            launch(kernel, programs, arguments, options)
