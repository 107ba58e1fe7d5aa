"""What a configuration asks of the devices, as far as one process can tell before ranks start.

Without torch until it is needed: whoever starts ranks does not import it for the usual run.
"""

from __future__ import annotations

from collections.abc import Callable

from megascale.config import RunConfig
from megascale.errors import ConfigError


def count_gpus() -> int:
    """CUDA devices that are visible. Makes no CUDA context."""
    import torch

    return torch.cuda.device_count()


def runs_on_gpus(config: RunConfig, num_gpus: int) -> bool:
    """Ranks take GPUs where there are any, unless the configuration says otherwise."""
    device = config.training.device
    return device == "cuda" or (device == "auto" and num_gpus > 0)


def check_devices_can(
    config: RunConfig, num_ranks: int, count: Callable[[], int] = count_gpus
) -> None:
    """Raises ConfigError for operators or a backend that the devices of the ranks cannot have.

    count  GPUs of this machine; asked only where the answer depends on it
    """
    mesh, par = config.mesh(num_ranks), config.parallelism
    named_form = mesh.tensor > 1 and par.flux in ("fused", "chunked")
    nccl = mesh.world_size > 1 and config.comm.backend == "nccl"
    if not named_form and not nccl:
        return
    device = config.training.device
    why = None
    if device == "cpu":
        why = "training.device is 'cpu'"
    elif device == "auto" and count() == 0:
        why = "this machine has no CUDA device (training.device 'cuda' plans for one that has)"
    if nccl and why is not None:
        raise ConfigError(
            f"comm.backend is 'nccl', which needs CUDA devices, and {why}; use 'auto', which takes "
            "gloo on a CPU"
        )
    if named_form:
        from megascale.flux.mode import choose_mode

        choose_mode(
            par.flux,
            obstacle=why and f"{why}; the kernels need CUDA devices",
            nccl_beside=mesh.pipeline > 1 or mesh.data > 1,
            reserve_sms=par.flux_reserve_sms,
        )
