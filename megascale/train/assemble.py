"""From a `RunConfig` to a rank that can train: the one place where all parts meet.

Order, visible below: groups; chunks of this stage on the meta device; their tensor-parallel shards;
flat buckets over data ranks; initial values into the master shards; optimizer; pipeline runtime.
Nothing is allocated at full size: a parameter exists only as its tensor shard, a master only as its
data shard.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megascale.config import RunConfig
from megascale.flux import TensorOps
from megascale.model.attention import Attention
from megascale.model.initialise import init_rules
from megascale.model.output_head import OutputHead
from megascale.model.sharding import sharding_table
from megascale.model.transformer import TransformerChunk
from megascale.ops.random import fill_normal_
from megascale.optim import Optimizer, Reductions, build_optimizer
from megascale.parallel.buckets import plan_buckets
from megascale.parallel.cross_entropy import sharded_cross_entropy
from megascale.parallel.groups import Groups, create_groups, summer
from megascale.parallel.pipeline import PipelineRuntime
from megascale.parallel.spans import Span, no_span
from megascale.parallel.tensor import (
    StoredParameter,
    TensorParallel,
    linear_operators,
    shard_chunk,
)
from megascale.parallel.transfers import create_links
from megascale.parallel.vocabulary import vocabulary_embedding
from megascale.parallel.zero import ShardedDataParallel
from megascale.plan.stages import split_layers
from megascale.shards import Placement
from megascale.topology import Mesh
from megascale.train.program import StageProgram
from megascale.train.shared_head import PARAMETER as HEAD
from megascale.train.shared_head import own_rows, shared_head
from megascale.train.state import master_pieces
from megascale.train.tensor_operators import tensor_operators

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
TIED = "embed.tokens.weight"


@dataclass
class Assembly:
    """A rank ready to step."""

    config: RunConfig
    mesh: Mesh
    groups: Groups
    device: torch.device
    chunks: dict[int, TransformerChunk]  # by global chunk number
    zero: ShardedDataParallel
    optimizer: Optimizer
    program: StageProgram
    runtime: PipelineRuntime
    span: Span
    ops: TensorOps  # of the tensor-parallel group

    @property
    def is_writer(self) -> bool:
        """Rank 0: writes the run folder's records."""
        place = self.groups.coordinates
        return place.tp_rank == place.dp_rank == place.pp_rank == 0


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of gradients, masters and moments: fp32 for bf16, else the parameters' own."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def assemble(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    span: Span = no_span,
    detail: Span = no_span,
) -> Assembly:
    """Build everything of this rank; parameters hold their initial values, gathered.

    detail  `span` where the parts of operators are to be seen too
    """
    par, dtype = config.parallelism, DTYPES[config.training.dtype]
    tied_over_stages = config.model.tie_embeddings and mesh.pipeline > 1
    groups = create_groups(
        mesh,
        tied_embeddings=tied_over_stages,
        shared_head=par.share_head,
        timeout_s=config.comm.timeout_s,
    )
    if groups.creation_s:
        times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in groups.creation_s.items())
        logger.info("process groups created: %s", times)
    place = groups.coordinates
    ops = replace(tensor_operators(par, groups, device), operators=config.operators.mode)
    tp_span = span if mesh.tensor > 1 else no_span  # without peers a linear waits for nobody
    tp = TensorParallel(groups.tensor, place.tp_rank, mesh.tensor, tp_span, ops, detail)
    layers = split_layers(config.model.num_layers, par.num_chunks)
    chunks: dict[int, TransformerChunk] = {}
    sharded: list[tuple[list[str], list[StoredParameter]]] = []
    for number in range(place.pp_rank, par.num_chunks, mesh.pipeline):
        chunks[number], stored = _chunk(config, layers, number, tp, dtype, tied_over_stages)
        sharded.append(([name for name, _ in chunks[number].units()], stored))
    head: OutputHead | None = None
    if par.share_head:
        head, stored = own_rows(config, groups, tp, dtype)
        sharded.append((["head"], stored))
    buckets = plan_buckets(
        sharded,
        bucket_bytes=par.bucket_mb * 1e6,
        main_itemsize=main_dtype(dtype).itemsize,
        num_data_ranks=mesh.data,
        data_rank=place.dp_rank,
    )
    zero = ShardedDataParallel(
        buckets,
        groups,
        zero_stage=par.zero_stage,
        device=device,
        dtype=dtype,
        main_dtype=main_dtype(dtype),
        overlap_grad_reduce=par.overlap_grad_reduce,
        overlap_param_gather=par.overlap_param_gather,
        reduce_in_bfloat16=par.grad_reduce_dtype == "bfloat16",
        span=span,
    )
    _watch_units([*chunks.values(), *([head] if head else [])], zero)
    initialise_masters(config, zero)
    names = tuple(block.name for _, stored in sharded for s in stored for block in s.blocks)
    optimizer = build_optimizer(
        config.optimizer,
        zero.flats(),
        _reductions(groups, names, _held_by_stages(config, mesh), span),
        kernels=None if config.operators.mode == "fused" else False,
    )
    program = StageProgram(
        config,
        groups,
        chunks,
        sharded_cross_entropy(config.model.vocab, tp, config.operators.mode),
        device=device,
        main_dtype=main_dtype(dtype),
        shared_head=shared_head(config, groups, head, tp, device) if head else None,
    )
    runtime = _runtime(config, groups, program, zero, span)
    return Assembly(
        config, mesh, groups, device, chunks, zero, optimizer, program, runtime, span, ops
    )


def _chunk(
    config: RunConfig,
    layers: Sequence[range],
    number: int,
    tp: TensorParallel,
    dtype: torch.dtype,
    tied_over_stages: bool,
) -> tuple[TransformerChunk, list[StoredParameter]]:
    """This rank's shard of chunk `number`, still on the meta device."""
    model = config.model
    last = number == len(layers) - 1
    chunk = TransformerChunk(
        model,
        layers[number],
        embed=number == 0,
        head=last and not config.parallelism.share_head,
        norm=last,
        num_positions=config.learned_positions,
        device="meta",
        dtype=dtype,
    )
    operators = linear_operators(tp)
    operators["lookup", Placement.VOCAB] = vocabulary_embedding(tp)
    stored = shard_chunk(
        chunk,
        sharding_table(model),
        chunk.units(),
        tp,
        operators=operators,
        tied=TIED if tied_over_stages else None,
        tied_copy=last,
    )
    for module in chunk.modules():
        if isinstance(module, Attention):
            module.head_offset = tp.rank * (model.num_heads // tp.size)
    return chunk, stored


def _watch_units(
    chunks: Sequence[TransformerChunk | OutputHead], zero: ShardedDataParallel
) -> None:
    """Let the data parallel see each unit begin in forward and end in backward."""
    for index, chunk in enumerate(chunks):
        numbers = {name: number for number, (name, _) in enumerate(chunk.units())}

        def before_unit(
            name: str, x: Tensor, index: int = index, numbers: dict[str, int] = numbers
        ) -> Tensor:
            return zero.boundary(index, numbers[name], x)

        chunk.before_unit = before_unit


@torch.no_grad()
def initialise_masters(config: RunConfig, zero: ShardedDataParallel) -> None:
    """Fill master shards by the rules of the model, equal in every layout, and gather."""
    rule = init_rules(config.model)
    for piece in master_pieces(zero):
        name = piece.key.removeprefix("master/")
        kind, *std = rule(name)
        if kind == "normal":
            fill_normal_(
                piece.tensor, config.training.seed, name, piece.box, piece.global_shape, *std
            )
        else:
            piece.tensor.fill_(1.0 if kind == "ones" else 0.0)
    zero.gather_parameters()


def _held_by_stages(config: RunConfig, mesh: Mesh) -> tuple[str, ...]:
    """Parameters of which several stages hold something: a copy, or a part that counts by itself.
    A norm is the sum over stages in both cases."""
    if config.model.tie_embeddings and mesh.pipeline > 1:
        return (TIED,)
    return (HEAD,) if config.parallelism.share_head else ()


def _reductions(
    groups: Groups, names: Sequence[str], held_by_stages: tuple[str, ...], span: Span
) -> Reductions:
    return Reductions(
        names=tuple(dict.fromkeys(names)),
        tied=held_by_stages,
        tp_rank=groups.coordinates.tp_rank,
        sum_over_data=summer(groups.data, "data", span),
        sum_over_tensor=summer(groups.tensor, "tensor", span),
        sum_over_pipeline=summer(groups.pipeline, "pipeline", span),
    )


def _runtime(
    config: RunConfig,
    groups: Groups,
    program: StageProgram,
    zero: ShardedDataParallel,
    span: Span,
) -> PipelineRuntime:
    par, mesh = config.parallelism, groups.mesh
    links = create_links(
        mesh,
        wrap=par.virtual_pipeline_size > 1,
        device=program.device,
        timeout_s=config.comm.timeout_s,
    )
    return PipelineRuntime(
        program,
        stage=groups.coordinates.pp_rank,
        stages=mesh.pipeline,
        chunks_per_stage=par.virtual_pipeline_size,
        schedule=par.schedule,
        transfers=par.pipeline_transfers,
        links=links,
        join_weight_gradients=par.join_weight_gradients,
        shared_head=par.share_head,
        on_backward_start=lambda chunk, _micro_batch, last: zero.backward_started(
            chunk // mesh.pipeline, last_micro_batch=last
        ),
        on_backward_done=lambda chunk, _micro_batch, _last: zero.backward_ended(
            chunk // mesh.pipeline
        ),
        span=span,
    )
