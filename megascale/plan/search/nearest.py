"""Why a job has no legal layout on a number of devices, and what is the nearest that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megascale.errors import ConfigError
from megascale.plan.case import Job
from megascale.plan.search.space import degrees, micro_batch_sizes

_FARTHEST = 5_000  # how many steps to each side are tried


def check_whole_nodes(num_devices: int, devices_per_node: int) -> None:
    """Raises ConfigError for nodes that are not alike: a collective would wait for the odd one."""
    if num_devices <= devices_per_node or num_devices % devices_per_node == 0:
        return
    below = num_devices // devices_per_node * devices_per_node
    raise ConfigError(
        f"{num_devices} devices are not whole nodes of {devices_per_node}; nearest legal: {below} "
        f"or {below + devices_per_node} (up to {devices_per_node}, any number)"
    )


def no_legal_layout(
    job: Job,
    num_devices: int,
    *,
    max_tensor: int,
    batch_sizes: tuple[int, ...],
    devices_per_node: int,
) -> ConfigError:
    """The error: which number is in the way, and the nearest ones that are not."""
    batches = batch_sizes or (job.global_batch_size,)
    final = batches[-1]
    grown = _nearest(final, 1, lambda b: is_possible(job, num_devices, max_tensor, (b,)))
    unit = devices_per_node if num_devices > devices_per_node else 1
    moved = _nearest(num_devices, unit, lambda n: is_possible(job, n, max_tensor, batches))
    told = f"of {batches[0]} to {final}" if len(batches) > 1 else f"of {final}"
    told += " sequence" if final == 1 else " sequences"
    choices = []
    if grown:
        choices.append(f"a global batch of {' or '.join(map(str, grown))}")
    if moved:
        choices.append(f"{' or '.join(map(str, moved))} devices")
    raised = f"nearest legal: {', or '.join(choices)}" if choices else "no other number helps"
    return ConfigError(
        f"no layout of {job.model.num_layers} layers, {job.model.num_heads} heads "
        f"({job.model.kv_heads} for keys and values) and a batch {told} fills {num_devices} "
        "devices: data parallelism times the micro-batch must divide the batch and leave as many "
        f"micro-batches as stages, tensor parallelism (at most {max_tensor}) must divide the heads "
        f"and the MLP's width, and a stage needs a layer; {raised}"
    )


def is_possible(job: Job, num_devices: int, max_tensor: int, batches: tuple[int, ...]) -> bool:
    """Whether any layout is legal."""
    return any(
        micro_batch_sizes(job, degree, batches)
        for degree in degrees(job, num_devices, max_tensor)
        if all(batch % degree[2] == 0 and batch >= degree[1] * degree[2] for batch in batches)
    )


def _nearest(number: int, step: int, is_legal: Callable[[int], bool]) -> list[int]:
    """The nearest legal one on each side, the nearer first; above, at most double is of use."""
    found = [next(filter(is_legal, side), None) for side in _sides(number, step)]
    near = [one for one in found if one and (one <= 2 * number or found[0] is None)]
    return sorted(near, key=lambda one: abs(one - number))


def _sides(number: int, step: int) -> Iterator[range]:
    first = number // step * step
    yield range(
        first if first < number else number - step, max(0, number - _FARTHEST * step), -step
    )
    yield range(first + step, number + _FARTHEST * step, step)
