"""`RunConfig`: all sections of a run, and the rules that span sections.

A rule about one section lives in that section's class. A rule about two lives here, is checked
before anything starts, and says what was got, what is legal and what to do.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from megascale.config.base import Section
from megascale.config.checkpoint import CheckpointConfig
from megascale.config.cluster import ClusterConfig
from megascale.config.comm import CommConfig
from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.operators import OperatorsConfig
from megascale.config.parallelism import ActivationCheckpointConfig, ParallelismConfig
from megascale.config.training import LrSchedulerConfig, OptimizerConfig, TrainingConfig
from megascale.errors import ConfigError
from megascale.topology import Mesh

_HOW_MANY = "(--nproc; of `megascale run`, --nodes times --procs-per-node)"


class JobConfig(Section):
    """Where a run writes, and what it is called."""

    run_dir: str = Field(
        "runs/default", min_length=1, description="one run a folder; resume is explicit"
    )
    description: str = ""


class ValidationConfig(Section):
    """Loss on the held-out split, every `interval` steps and at the end; 0: never."""

    interval: int = Field(0, ge=0)
    batches: int = Field(4, ge=1, description="global batches a validation")


class MetricsConfig(Section):
    """The log line, JSONL, TensorBoard and Weights & Biases."""

    log_interval: int = Field(1, ge=1)
    tensorboard: bool = True
    wandb: bool = Field(
        False, description="also to Weights & Biases; WANDB_MODE=offline works without a network"
    )
    peak_tflops: float | None = Field(
        None, gt=0.0, description="None: known devices only; an unknown device prints no MFU"
    )


class TelemetryConfig(Section):
    """The recorder (MegaScale 5.1): spans of every phase, one line file a rank."""

    enable: bool = True
    span_interval: int = Field(
        10, ge=1, description="full spans every N steps; sums per phase every step"
    )
    buffer_events: int = Field(65536, ge=16, description="full: drop and count, never block")
    waterfall: bool = Field(
        False,
        description="mark every operator by class of work, forward and backward; for measurements",
    )
    memory_snapshot_on_oom: bool = Field(
        True,
        description="a GPU that is out of memory leaves what it held in RUN/profiles/out-of-memory",
    )
    memory_interval: int = Field(
        100, ge=0, description="every rank says its peak memory every N steps; 0: when it ends"
    )
    ongoing_after_s: float = Field(
        10.0, gt=0.0, description="a collective waited for so long: the rank records what it is in"
    )
    queue: str = Field(
        "",
        pattern=r"^($|redis://|kafka://)",
        description="streamers publish to it: redis://HOST:PORT/NAME, kafka://HOST:PORT/TOPIC; "
        "empty: straight from the run's files",
    )
    keep_gb: float = Field(20.0, gt=0.0, description="the store's size; its oldest spans go first")
    keep_days: float = Field(30.0, gt=0.0, description="the store's age, in days")
    prometheus_port: int = Field(
        0, ge=0, le=65535, description="a node's endpoint, on loopback; 0: none"
    )

    @model_validator(mode="after")
    def _somebody_records(self) -> TelemetryConfig:
        if self.waterfall and not self.enable:
            raise ValueError(
                "telemetry.waterfall is true without telemetry.enable; operators are marked for a "
                "recorder: enable it, or leave waterfall out"
            )
        return self


class DebugConfig(Section):
    """Slower, for finding faults."""

    deterministic: bool = False
    check_replicas_interval: int = Field(
        0, ge=0, description="compare parameter hashes over data ranks every N steps; 0: never"
    )


class RunConfig(Section):
    """Everything a run needs. Stored, resolved, in the run folder."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    operators: OperatorsConfig = OperatorsConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    comm: CommConfig = CommConfig()
    cluster: ClusterConfig = ClusterConfig()
    debug: DebugConfig = DebugConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        self._check_tensor_parallel()
        self._check_pipeline()
        self._check_positions()
        self._check_learning_rate()
        if self.checkpoint.initial_load_in_hf and not self.checkpoint.initial_load_path:
            raise ValueError(
                "checkpoint.initial_load_in_hf is true without checkpoint.initial_load_path; name "
                "the Hugging Face folder there"
            )
        return self

    def _check_tensor_parallel(self) -> None:
        tp = self.parallelism.tensor_parallel_size
        for name, value in (
            ("model.num_heads", self.model.num_heads),
            ("model.num_kv_heads", self.model.kv_heads),
            ("model.ffn_hidden_size", self.model.ffn_size),
        ):
            if value % tp:
                raise ValueError(
                    f"parallelism.tensor_parallel_size {tp} does not divide {name} {value}; "
                    f"legal sizes: {_divisors(value)}"
                )
        tokens = self.training.micro_batch_size * self.training.seq_len
        if tokens % tp:
            raise ValueError(
                f"parallelism.tensor_parallel_size {tp} does not divide the {tokens} tokens of a "
                "micro-batch (micro_batch_size x seq_len), which sequence parallelism splits; "
                "change training.seq_len or training.micro_batch_size"
            )

    def _check_pipeline(self) -> None:
        if self.parallelism.share_head and self.model.tie_embeddings:
            raise ValueError(
                "parallelism.share_head is true with model.tie_embeddings: the first stage would "
                "hold the embedding whole and the head in part; set one of them to false"
            )
        chunks = self.parallelism.num_chunks
        if self.model.num_layers < chunks:
            raise ValueError(
                f"model.num_layers {self.model.num_layers} cannot fill {chunks} chunks "
                f"(pipeline_parallel_size {self.parallelism.pipeline_parallel_size} x "
                f"virtual_pipeline_size {self.parallelism.virtual_pipeline_size}); each chunk "
                "needs a layer: lower one of the two"
            )

    def _check_positions(self) -> None:
        rows = self.model.max_seq_len
        if self.model.position == "learned" and rows is not None and rows < self.training.seq_len:
            raise ValueError(
                f"training.seq_len {self.training.seq_len} is longer than the {rows} learned "
                "positions of model.max_seq_len; raise max_seq_len or shorten seq_len"
            )

    def _check_learning_rate(self) -> None:
        schedule = self.lr_scheduler
        if schedule.decay_steps is not None and schedule.decay_steps <= schedule.warmup_steps:
            raise ValueError(
                f"lr_scheduler.decay_steps {schedule.decay_steps} is not behind "
                f"lr_scheduler.warmup_steps {schedule.warmup_steps}; decay_steps counts from step "
                "0 and is where the minimum is reached: raise it, or leave it out"
            )

    @property
    def learned_positions(self) -> int:
        """Rows of the learned position table."""
        return self.model.max_seq_len or self.training.seq_len

    def mesh(self, world_size: int) -> Mesh:
        """The mesh on `world_size` ranks, with the batch rules checked on it.

        Raises ConfigError where the degrees do not fill the world or the batch does not divide.
        """
        par = self.parallelism
        if par.layout == "auto":
            raise ConfigError(
                "parallelism.layout is 'auto': `megascale train` and `megascale run` choose a "
                "layout when they start; elsewhere give one (`megascale plan RECIPE` prints it) "
                "with --set parallelism.layout=given"
            )
        model_ranks = par.model_parallel_size
        if world_size % model_ranks:
            raise ConfigError(
                f"{world_size} ranks cannot hold tensor_parallel_size {par.tensor_parallel_size} x "
                f"pipeline_parallel_size {par.pipeline_parallel_size} = {model_ranks} ranks a "
                f"model replica; start a multiple of {model_ranks} ranks {_HOW_MANY}"
            )
        data = world_size // model_ranks
        if par.data_parallel_size not in (-1, data):
            raise ConfigError(
                f"parallelism.data_parallel_size is {par.data_parallel_size}, but {world_size} "
                f"ranks leave {data}; set it to {data} or -1, or start "
                f"{par.data_parallel_size * model_ranks} ranks {_HOW_MANY}"
            )
        for batch in self.training.batch_sizes():
            self.micro_batches(batch, data)
        return Mesh(par.tensor_parallel_size, data, par.pipeline_parallel_size)

    def micro_batches(self, global_batch: int, data_parallel_size: int) -> int:
        """Micro-batches a pipeline runs for one step of `global_batch` sequences."""
        par, micro = self.parallelism, self.training.micro_batch_size
        unit = micro * data_parallel_size
        if global_batch % unit:
            below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
            raise ConfigError(
                f"global batch {global_batch} is not a multiple of micro_batch_size {micro} x "
                f"data_parallel_size {data_parallel_size} = {unit}; "
                f"nearest legal: {f'{below} or {above}' if below else above}"
            )
        count = global_batch // unit
        pp = par.pipeline_parallel_size
        if count < pp:
            raise ConfigError(
                f"{count} micro-batch(es) cannot fill a pipeline of {pp} stages; the smallest "
                f"legal global batch is {pp * unit}, got {global_batch}"
            )
        if par.needs_whole_groups and count % pp:
            raise ConfigError(
                f"the interleaved schedule needs micro-batches in multiples of "
                f"pipeline_parallel_size {pp}, got {count}; the nearest legal global batches are "
                f"{count // pp * pp * unit} and {(count // pp + 1) * pp * unit}"
            )
        return count


def _divisors(number: int) -> str:
    small = [d for d in range(1, min(number, 1024) + 1) if number % d == 0]
    return ", ".join(map(str, small[:12]))
