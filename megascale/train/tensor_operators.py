"""The tensor-parallel operators of a run: which form its layout and its machine allow."""

from __future__ import annotations

import logging

import torch

from megascale.config import ParallelismConfig
from megascale.flux import TensorOps, choose_mode
from megascale.flux.machine import why_not_fused
from megascale.parallel.groups import Groups

logger = logging.getLogger(__name__)


def tensor_operators(par: ParallelismConfig, groups: Groups, device: torch.device) -> TensorOps:
    """The operators of this rank's tensor-parallel group, in the form that is asked for and safe.

    Collective over that group. Raises ConfigError where the form cannot be had.
    """
    if groups.tensor is None:
        return TensorOps.of(None)
    mesh = groups.mesh
    choice = choose_mode(
        par.flux,
        obstacle=None if par.flux == "reference" else why_not_fused(groups.tensor, device),
        nccl_beside=mesh.pipeline > 1 or mesh.data > 1,
        reserve_sms=par.flux_reserve_sms,
    )
    logger.info("tensor-parallel operators: %s", choice)
    return TensorOps.of(
        groups.tensor, mode=choice.mode, spin=choice.spin, reserve_sms=par.flux_reserve_sms
    )
