"""The typed configuration of a run: sections with the field's names, TOML recipes, overrides."""

from megascale.config.checkpoint import CheckpointConfig
from megascale.config.comm import CommConfig
from megascale.config.data import DataConfig, MixturePart
from megascale.config.load import load_config, parse_config, with_overrides
from megascale.config.model import ModelConfig, RopeScaling
from megascale.config.operators import OperatorsConfig
from megascale.config.parallelism import ActivationCheckpointConfig, ParallelismConfig
from megascale.config.presets import PRESETS
from megascale.config.run import (
    DebugConfig,
    JobConfig,
    MetricsConfig,
    RunConfig,
    TelemetryConfig,
    ValidationConfig,
)
from megascale.config.training import (
    BatchRampUp,
    LrSchedulerConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "PRESETS",
    "ActivationCheckpointConfig",
    "BatchRampUp",
    "CheckpointConfig",
    "CommConfig",
    "DataConfig",
    "DebugConfig",
    "JobConfig",
    "LrSchedulerConfig",
    "MetricsConfig",
    "MixturePart",
    "ModelConfig",
    "OperatorsConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "RopeScaling",
    "RunConfig",
    "TelemetryConfig",
    "TrainingConfig",
    "ValidationConfig",
    "load_config",
    "parse_config",
    "with_overrides",
]
