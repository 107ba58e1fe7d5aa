"""The space is what the trainer takes: nothing more, and nothing less but what is told."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from megascale.config import ModelConfig, RunConfig, parse_config
from megascale.errors import ConfigError
from megascale.plan.case import Job, Layout, case_of, overrides_of
from megascale.plan.describe import describe
from megascale.plan.search.nearest import check_whole_nodes, is_possible, no_legal_layout
from megascale.plan.search.space import Limits, Space, legal_layouts

TINY: dict[str, Any] = {"preset": "tiny-llama", "num_layers": 5}
JOBS = [
    ("megascale-175b", 6144, 2048, 12288),
    ("megascale-530b", 11200, 2048, 11200),
    ("llama3-70b", 1024, 8192, 512),
    ("llama3-8b", 48, 4096, 24),
    ("qwen2.5-7b", 60, 1001, 12),
]


def _config(job: Job, preset: dict[str, Any], layout: Layout) -> RunConfig:
    """As `--set` would make it."""
    sections: dict[str, dict[str, Any]] = {
        "model": preset,
        "training": {"global_batch_size": job.global_batch_size, "seq_len": job.seq_len},
    }
    for override in overrides_of(layout):
        path, _, text = override.partition("=")
        section, key = path.split(".")
        value = {"true": True, "false": False}.get(text, text)
        sections.setdefault(section, {})[key] = (
            int(text) if isinstance(value, str) and text.isdigit() else value
        )
    return parse_config(sections)


@pytest.mark.parametrize(("preset", "batch", "seq_len", "gpus"), JOBS)
def test_what_is_proposed_is_taken(preset: str, batch: int, seq_len: int, gpus: int) -> None:
    job = Job(ModelConfig(preset=preset, max_seq_len=8192), batch, seq_len)
    space = legal_layouts(job, gpus)
    assert len(space) > 100
    random = np.random.default_rng(7)
    for place in random.choice(len(space), 40, replace=False):
        layout = space.layout(place)
        assert layout.num_devices == gpus
        config = _config(job, {"preset": preset, "max_seq_len": 8192}, layout)
        case = case_of(config, gpus)
        assert case.layout == layout
        assert case.micro_batches == space.micro_batches[place]


def test_a_dry_run_takes_them_schedule_and_all() -> None:
    job = Job(ModelConfig(**TINY), 48, 32)
    space = legal_layouts(job, 8)
    random = np.random.default_rng(3)
    for place in random.choice(len(space), 60, replace=False):
        layout = space.layout(place)
        described = describe(_config(job, TINY, layout), 8)
        assert described.schedule == layout.schedule
        assert described.micro_batches == space.micro_batches[place]


def test_what_is_taken_is_proposed() -> None:
    """Every combination of small numbers, asked of the configuration classes."""
    job = Job(ModelConfig(**TINY), 12, 32)
    taken = set()
    for tensor, pipeline, virtual, size, schedule, share in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 4, 6, 12), SCHEDULES, (False, True)
    ):
        if 12 % (tensor * pipeline):
            continue
        layout = Layout(
            tensor=tensor,
            pipeline=pipeline,
            virtual=virtual,
            data=12 // (tensor * pipeline),
            micro_batch_size=size,
            schedule=schedule,
            share_head=share,
        )
        try:
            _config(job, TINY, layout).mesh(12)
        except ConfigError:
            continue
        if not _is_left_out(layout):
            taken.add(layout)
    only = Limits(zero_stages=(1,), recomputes=("none",), joins=(1,))
    assert set(legal_layouts(job, 12, limits=only).layouts()) == taken
    assert len(taken) > 15


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb")


def _is_left_out(layout: Layout) -> bool:
    if layout.pipeline == 1:
        return layout.schedule != "1f1b"
    interleaved = layout.schedule.startswith("interleaved")
    return layout.schedule == "gpipe" or (interleaved and layout.virtual == 1)


def test_switches_that_mean_nothing_are_not_listed_twice() -> None:
    job = Job(ModelConfig(**TINY), 8, 32)
    layouts = list(legal_layouts(job, 2).layouts())
    assert len(layouts) == len(set(layouts))
    assert {one.zero_stage for one in layouts if one.data == 1} == {1}
    assert {one.zero_stage for one in layouts if one.data == 2} == {1, 2}
    tied = Job(ModelConfig(preset="tiny-gpt", num_layers=4), 8, 32)
    assert not any(one.share_head for one in legal_layouts(tied, 2).layouts())
    assert any(one.share_head for one in layouts)
    coupled = legal_layouts(job, 2, transfers="coupled")
    assert not coupled.share_head.any()


def test_a_batch_that_grows_is_whole_at_every_size() -> None:
    job = Job(ModelConfig(**TINY), 16, 32)
    space = legal_layouts(job, 4, batch_sizes=(4, 8, 12, 16))
    units = space.micro_batch_size * space.data
    assert len(space)
    assert all((batch % units == 0).all() for batch in (4, 8, 12, 16))
    assert (4 // units >= space.pipeline).all()
    interleaved = space.virtual > 1
    assert (4 // units % space.pipeline == 0)[interleaved].all()


def test_taking_keeps_columns_together() -> None:
    space: Space = legal_layouts(Job(ModelConfig(**TINY), 8, 32), 4)
    some = space.take(space.pipeline == 2)
    assert 0 < len(some) < len(space)
    assert {one.pipeline for one in some.layouts()} == {2}
    assert some.layout(3) == next(itertools.islice(some.layouts(), 3, None))


def test_uneven_nodes_are_refused_with_the_nearest() -> None:
    check_whole_nodes(3, 8)
    check_whole_nodes(64, 8)
    with pytest.raises(ConfigError, match=r"100 devices are not whole nodes of 8; .*: 96 or 104"):
        check_whole_nodes(100, 8)


def test_the_nearest_batch_and_number_are_named() -> None:
    job = Job(ModelConfig(**TINY), 5, 32)
    assert len(legal_layouts(job, 7)) == 0
    error = no_legal_layout(job, 7, max_tensor=8, batch_sizes=(), devices_per_node=8)
    assert "a batch of 5 sequences fills 7 devices" in str(error)
    assert str(error).endswith("nearest legal: a global batch of 7, or 6 or 8 devices")
    for batch in range(1, 16):
        other = Job(job.model, batch, 32)
        for gpus in range(1, 10):
            assert is_possible(other, gpus, 8, (batch,)) == (len(legal_layouts(other, gpus)) > 0)


def test_the_nearest_number_is_of_whole_nodes() -> None:
    job = Job(ModelConfig(**TINY), 6, 32)
    assert len(legal_layouts(job, 104)) == 0
    error = no_legal_layout(job, 104, max_tensor=8, batch_sizes=(), devices_per_node=8)
    assert str(error).endswith("nearest legal: a global batch of 52, or 8 devices")
