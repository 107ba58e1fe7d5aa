"""`[checkpoint]`: what is saved, in which tiers, when, and what a run starts from (MegaScale 4.4).

Four places keep a state: the rank's own memory, a peer's, a folder of the run, and a remote one.
The first two are the memory tier. Names are the field's where it has them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import Section


class CheckpointConfig(Section):
    """What is saved, when, and what a run starts from. Steps and minutes given: whichever is first.

    docs/checkpoint.md says what each tier costs and brings back.
    """

    enable: bool = True
    interval: int = Field(
        0, ge=0, description="steps between checkpoints on disk; 0: only at the end"
    )
    interval_minutes: float = Field(
        0.0, ge=0.0, description="minutes between checkpoints on disk; 0: steps alone decide"
    )
    async_mode: Literal["background", "off"] = Field(
        "background",
        description="checkpoints on disk are written behind training, from a copy in host memory; "
        "off: training waits for them",
    )
    keep_latest_k: int = Field(3, ge=1, description="checkpoints that stay on disk")
    save_at_end: bool = True
    initial_load_path: str = Field(
        "", description="checkpoint or run folder of ours, or a Hugging Face folder"
    )
    initial_load_in_hf: bool = Field(False, description="initial_load_path is Hugging Face's")
    memory_interval: int = Field(
        0,
        ge=0,
        description="steps between saves to memory that outlives a rank, where the ranks have an "
        "agent (`megascale run`); 0: never",
    )
    memory_copies: bool = Field(
        True, description="each rank's memory is also kept by a rank of another node"
    )
    remote: str = Field(
        "",
        description="where checkpoints are copied once they are on disk: s3://BUCKET/FOLDER, "
        "another URL of fsspec, or a folder; of one run alone; empty: nowhere",
    )
    remote_interval: int = Field(
        0,
        ge=0,
        description="steps between copies to remote, a multiple of interval; 0, and no minutes: "
        "each checkpoint is copied",
    )
    remote_interval_minutes: float = Field(
        0.0, ge=0.0, description="minutes between copies to remote; 0: steps alone decide"
    )
    remote_keep_latest_k: int = Field(3, ge=1, description="checkpoints that stay at remote")

    @model_validator(mode="after")
    def _tiers_agree(self) -> CheckpointConfig:
        if self.remote:
            self._check_remote()
        else:
            for name in ("remote_interval", "remote_interval_minutes"):
                if getattr(self, name):
                    raise ValueError(
                        f"checkpoint.{name} is {getattr(self, name):g} without checkpoint.remote; "
                        "name the place there (s3://BUCKET/FOLDER, a folder), or leave it out"
                    )
        return self

    def _check_remote(self) -> None:
        """What is copied is a checkpoint on disk."""
        if self.remote != self.remote.strip():
            raise ValueError(
                f"checkpoint.remote is {self.remote!r}, with spaces around it; legal: "
                f"{self.remote.strip()!r}"
            )
        if not (self.saves_during_training or self.save_at_end):
            raise ValueError(
                f"checkpoint.remote is {self.remote!r}, but nothing is saved that could be copied "
                "there; set checkpoint.interval, checkpoint.interval_minutes or "
                "checkpoint.save_at_end"
            )
        steps, minutes = self.remote_interval, self.remote_interval_minutes
        if steps and not self.interval:
            raise ValueError(
                f"checkpoint.remote_interval is {steps} without checkpoint.interval, and what is "
                f"copied is a checkpoint on disk; set checkpoint.interval to {steps} or a divisor "
                "of it, or give checkpoint.remote_interval_minutes instead"
            )
        if steps and steps % self.interval:
            below, above = steps // self.interval * self.interval, -(-steps // self.interval)
            nearest = [str(n) for n in (below, above * self.interval) if n]
            raise ValueError(
                f"checkpoint.remote_interval {steps} is not a multiple of checkpoint.interval "
                f"{self.interval}, and what is copied is a checkpoint on disk; nearest legal: "
                f"{' or '.join(nearest)}"
            )
        if minutes and not self.saves_during_training:
            raise ValueError(
                f"checkpoint.remote_interval_minutes is {minutes:g}, but checkpoints are saved "
                "only at the end; set checkpoint.interval or checkpoint.interval_minutes"
            )
        if minutes and not self.interval and minutes < self.interval_minutes:
            raise ValueError(
                f"checkpoint.remote_interval_minutes {minutes:g} is shorter than "
                f"checkpoint.interval_minutes {self.interval_minutes:g}, and what is copied is a "
                f"checkpoint on disk; nearest legal: {self.interval_minutes:g}"
            )

    @property
    def saves_during_training(self) -> bool:
        """Are there checkpoints on disk before the end?"""
        return bool(self.interval or self.interval_minutes)

    @property
    def is_behind(self) -> bool:
        """Are checkpoints on disk written behind training?"""
        return self.enable and self.async_mode == "background" and self.saves_during_training
