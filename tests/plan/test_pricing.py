"""Prices of a step's pieces: by hand on a machine of round numbers, by property on real ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import ModelConfig
from megascale.plan.buckets import BucketSize, Unit, join_units, stage_buckets
from megascale.plan.case import Case, Job, Layout, Software, case_of, overrides_of
from megascale.plan.effects.effects import Effects, NetworkShare
from megascale.plan.machine.cluster import Cluster
from megascale.plan.machine.load import load_cluster
from megascale.plan.prices import StepPrices
from megascale.plan.pricing import price
from tests.plan.machines import RoundDevice, RoundMachine

MODEL = ModelConfig(
    hidden_size=512, num_layers=8, num_heads=8, vocab_size=1024, norm="layernorm",
    activation="gelu_tanh", position="learned", bias="all",
)  # fmt: skip
A100 = load_cluster("a100", 64)
H200 = load_cluster("h200", 64)
MEGASCALE = ModelConfig(preset="megascale-175b")
BASELINE = Software(
    tensor_overlap="backward", transfers="coupled", overlap_grad_reduce=False,
    overlap_param_gather=False, operators="plain", host_ahead=False,
)  # fmt: skip


def case(software: Software | None = None, model: ModelConfig = MODEL, **layout: Any) -> Case:
    sizes: dict[str, Any] = {"tensor": 2, "data": 2, "pipeline": 2, "virtual": 2, **layout}
    sizes.setdefault("schedule", "interleaved_1f1b" if sizes["virtual"] > 1 else "1f1b")
    return Case(Job(model, 16, 256), Layout(**sizes), software or Software())


def seconds(prices: StepPrices) -> float:
    """Of all pieces together: what more of anything makes larger."""
    chunks = sum(chunk.forward.total_s + chunk.backward.total_s for chunk in prices.chunks)
    data = sum(
        sum(map(sum, stage.reduce_s.values())) + sum(map(sum, stage.gather_s.values()))
        for stage in prices.data
    )
    return chunks + data + sum(prices.transfer_s) + sum(prices.update_s) + prices.embedding_s


def test_chunks_hold_their_layers_and_the_ends() -> None:
    """8 layers in 4 chunks: two each; the first has the embedding more, the last the head."""
    machine = RoundMachine().cluster
    first, second, third, last = price(case(), machine).chunks
    assert second == third
    layers = 2 * 12 * 512**2 * 2 * 256 / 2 / 1e12  # two of 12 h^2 weights, on two ranks
    assert second.forward.gemm_s == pytest.approx(layers)
    head = 2 * 256 * 512 * 512 / 1e12
    assert last.forward.gemm_s - second.forward.gemm_s == pytest.approx(head)
    assert first.forward.gemm_s == second.forward.gemm_s
    assert first.forward.memory_s > second.forward.memory_s


def test_layers_that_do_not_divide_are_where_the_trainer_puts_them() -> None:
    machine = RoundMachine().cluster
    model = MODEL.model_copy(update={"num_layers": 9})
    prices = price(case(model=model), machine)
    gemms = [chunk.forward.gemm_s for chunk in prices.chunks[:3]]
    assert gemms[0] == pytest.approx(1.5 * gemms[1])
    assert gemms[1] == gemms[2]


def test_transfers_carry_the_own_rows() -> None:
    machine = RoundMachine().cluster
    own = 256 * 512 * 2 / 2
    assert price(case(), machine).transfer_s == (own / 1e9,) * 4
    assert price(case(pipeline=1, virtual=1), machine).transfer_s == (0.0,)
    whole = price(case(Software(sequence_parallel=False)), machine).transfer_s[0]
    assert whole == pytest.approx((own + own) / 1e9)  # and gathered: half of all rows


def test_a_host_that_waits_for_the_device_launches_anew() -> None:
    machine = RoundMachine(device=RoundDevice(restart_s=0.5)).cluster
    waits = Software(transfers="coupled", synchronises=True)
    plain = price(case(), machine).transfer_s[0]
    assert price(case(waits), machine).transfer_s[0] == pytest.approx(plain + 0.5 / 2)
    one = case(waits, virtual=1)
    assert price(one, machine).transfer_s[0] == pytest.approx(plain + 0.5)
    tokens = 2 * 8 * 16 / 2 * 256  # int64 tokens and labels of a rank's half of the batch
    behind = price(case(Software(host_ahead=False)), machine)
    assert behind.load_s == pytest.approx(0.5 + tokens / 1e9)
    assert price(case(), machine).load_s == 0.0


@pytest.mark.parametrize(
    ("zero", "reduced", "gathered"),
    [(0, 2 * 4, 0.0), (1, 4, 2), (2, 4, 2), (3, 4, 2)],
)
def test_data_parallel_bytes(zero: Any, reduced: float, gathered: float) -> None:
    """Of each of two ranks half of all elements travels; an all-reduce goes twice."""
    machine = RoundMachine().cluster
    one = case(zero_stage=zero)
    elements = [b.elements for held in stage_buckets(one, 0).values() for b in held]
    data = price(one, machine).data[0]
    assert sum(map(sum, data.reduce_s.values())) == pytest.approx(reduced * sum(elements) / 2e9)
    assert sum(map(sum, data.gather_s.values())) == pytest.approx(gathered * sum(elements) / 2e9)
    assert {chunk: sum(layers) for chunk, layers in data.bucket_layers.items()} == {0: 2, 2: 2}


def test_gradients_in_bf16_travel_at_half_the_bytes_and_are_cast_and_summed() -> None:
    machine = RoundMachine(memory=1e12).cluster
    full, half = (
        sum(map(sum, price(case(Software(grad_reduce_bytes=b)), machine).data[0].reduce_s.values()))
        for b in (4, 2)
    )
    elements = sum(b.elements for held in stage_buckets(case(), 0).values() for b in held)
    assert half == pytest.approx(full / 2 + 12 * elements / 1e12)


def test_without_data_parallelism_nothing_is_reduced() -> None:
    data = price(case(data=1), RoundMachine().cluster).data[0]
    assert (data.reduce_s, data.gather_s) == ({}, {})


def test_tied_embeddings_are_summed_shard_by_shard() -> None:
    tied = MODEL.model_copy(update={"tie_embeddings": True})
    machine = RoundMachine().cluster
    shard = 512 * 512 / 2  # of 1024 rows over two tensor ranks, two data ranks
    assert price(case(model=tied), machine).embedding_s == pytest.approx(4 * shard / 1e9)
    assert price(case(model=tied, zero_stage=0), machine).embedding_s == pytest.approx(
        4 * 2 * shard / 1e9
    )
    assert price(case(), machine).embedding_s == 0.0


def test_effects_multiply_and_add() -> None:
    machine = RoundMachine(devices_per_node=2).cluster  # tensor ranks inside, the rest across
    effects = Effects(
        NetworkShare(data=0.5, pipeline=0.25), compute_factor=2.0, launch_skew_s=0.25, fixed_s=0.5
    )
    plain, scaled = price(case(), machine), price(case(), machine, effects)
    assert scaled.chunks[1].forward.gemm_s == 2 * plain.chunks[1].forward.gemm_s
    assert scaled.chunks[1].forward.memory_s == 2 * plain.chunks[1].forward.memory_s
    assert scaled.transfer_s[0] == 4 * plain.transfer_s[0]
    assert scaled.data[0].reduce_s[0] == tuple(2 * s for s in plain.data[0].reduce_s[0])
    assert (plain.fixed_s, scaled.fixed_s) == (0.0, 0.75)


def test_a_shared_head_is_priced_for_every_stage() -> None:
    machine = RoundMachine().cluster
    shared = price(case(share_head=True), machine)
    assert shared.head is not None
    alone = price(case(), machine)
    assert alone.head is None
    own = alone.chunks[-1].forward.gemm_s - alone.chunks[1].forward.gemm_s
    assert shared.head.forward.gemm_s == pytest.approx(own / 2)
    assert shared.chunks[-1].forward.gemm_s == shared.chunks[1].forward.gemm_s


# ---------------------------------------------------------------- buckets


def test_units_are_joined_up_to_a_limit_the_first_to_an_eighth() -> None:
    table, layer = Unit(100, False), Unit(50, True)
    units = (table, *[layer] * 5)
    assert join_units(units, 1000) == (BucketSize(100, 0), BucketSize(250, 5))
    assert join_units(units, 100) == (
        BucketSize(100, 0), BucketSize(100, 2), BucketSize(100, 2), BucketSize(50, 1),
    )  # fmt: skip
    assert join_units(units, float("inf")) == (BucketSize(350, 5),)
    tied = Unit(100, False, alone=True)
    assert join_units((tied, layer), float("inf")) == (BucketSize(100, 0), BucketSize(50, 1))


@pytest.mark.parametrize("bucket_mb", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("tied", [False, True])
def test_buckets_are_those_of_the_trainer(bucket_mb: float, tied: bool) -> None:
    """`parallel/buckets.py` on the model's own modules, a stage of two chunks."""
    from megascale.config import parse_config
    from megascale.parallel.buckets import plan_buckets
    from tests.plan.trainer_buckets import stored_of_stage

    config = parse_config(
        {
            "model": {**MODEL.model_dump(exclude_none=True), "tie_embeddings": tied},
            "parallelism": {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
                "bucket_mb": bucket_mb,
            },
            "training": {"global_batch_size": 8, "dtype": "bfloat16"},
        }
    )
    for stage in range(2):
        buckets = plan_buckets(
            stored_of_stage(config, stage),
            bucket_bytes=bucket_mb * 1e6,
            main_itemsize=4,
            num_data_ranks=1,
            data_rank=0,
        )
        found: dict[int, list[int]] = {}
        for bucket in buckets:
            found.setdefault(2 * bucket.chunk + stage, []).append(bucket.num_elements)
        own = stage_buckets(case_of(config, 2), stage)
        assert own.keys() == found.keys()
        for chunk, held in own.items():
            assert [b.elements for b in held] == pytest.approx(found[chunk], rel=0.01), chunk


# ---------------------------------------------------------------- properties


def faster(cluster: Cluster, section: str, **changes: float) -> Cluster:
    """With other numbers in one section."""
    part = getattr(cluster, section)
    return cluster.model_copy(update={section: part.model_copy(update=changes)})


@settings(max_examples=25, deadline=None)
@given(
    factor=st.floats(1.01, 10.0),
    tensor=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 4]),
    sequence_parallel=st.booleans(),
    overlap=st.sampled_from(["none", "backward", "chunked", "fused"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_more_bandwidth_is_never_slower(
    factor: float,
    tensor: int,
    pipeline: int,
    sequence_parallel: bool,
    overlap: Any,
    recompute: Any,
) -> None:
    software = Software(sequence_parallel=sequence_parallel, tensor_overlap=overlap)
    one = case(
        software, MEGASCALE, tensor=tensor, pipeline=pipeline, virtual=1,
        data=64 // tensor // pipeline, recompute=recompute,
    )  # fmt: skip
    one = replace(one, job=replace(one.job, global_batch_size=256))
    base = seconds(price(one, A100))
    assert A100.network is not None
    wide = faster(A100, "network", nic_gb_s=A100.network.nic_gb_s * factor)
    wider = faster(wide, "nvlink", gb_s=A100.nvlink.gb_s * factor)
    memory = faster(A100, "device", memory_gb_s=A100.device.memory_gb_s * factor)
    for cluster in (wide, wider, memory):
        assert seconds(price(one, cluster)) <= base * (1 + 1e-9)


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_technique_is_never_slower_than_its_absence(block: Any, recompute: Any) -> None:
    """The paper's layout at 256 GPUs (MegaScale Table 3), one switch after the other."""
    cluster = load_cluster("paper", 256)
    model = MEGASCALE.model_copy(update={"block": block})

    def sums(software: Software, model: ModelConfig = model) -> float:
        layout = Layout(
            tensor=8, pipeline=8, virtual=6, data=4, recompute=recompute,
            schedule="interleaved_1f1b",
        )  # fmt: skip
        return seconds(price(Case(Job(model, 256, 2048), layout, software), cluster))

    for technique in (
        {"tensor_overlap": "chunked", "copy_engines": False},
        {"tensor_overlap": "chunked"},
        {"tensor_overlap": "fused"},
        {"operators": "fused"},
        {"grad_reduce_bytes": 2},
    ):
        assert sums(replace(BASELINE, **technique)) < sums(BASELINE), technique
    assert sums(BASELINE) < sums(replace(BASELINE, tensor_overlap="none"))
    assert sums(BASELINE) < sums(replace(BASELINE, attention="scores"))
    window = model.model_copy(update={"attention_window": 512})
    assert sums(BASELINE, window) < sums(BASELINE)
    if block == "serial":
        parallel = model.model_copy(update={"block": "parallel"})
        assert sums(BASELINE, parallel) < sums(BASELINE)


def test_recomputation_costs_a_forward_and_no_more() -> None:
    cluster = load_cluster("a100", 64)
    layout: dict[str, Any] = {"tensor": 8, "pipeline": 8, "virtual": 1, "data": 1}
    none, full = (
        price(case(model=MEGASCALE, recompute=r, **layout), cluster).chunks[1]
        for r in ("none", "full")
    )
    assert full.recompute == full.forward
    assert none.recompute.total_s == 0.0
    assert full.forward.gemm_s == none.forward.gemm_s


def test_all_prices_are_positive_and_finite() -> None:
    for layout in ({}, {"share_head": True}, {"virtual": 1, "schedule": "zb_h1"}):
        prices = price(case(**layout), A100)
        held = [*prices.chunks, *([prices.head] if prices.head else [])]
        for chunk in held:
            for field in fields(chunk):
                assert 0.0 <= getattr(chunk, field.name).total_s < 1.0


def test_a_layout_s_overrides_lead_back_to_it() -> None:
    from megascale.config import parse_config
    from megascale.config.load import load_config

    layout = case(share_head=True, join_weight_gradients=2).layout
    config = load_config(
        None,
        [
            "model.preset=tiny-llama", "training.global_batch_size=16",
            "training.dtype=bfloat16", *overrides_of(layout),
        ],
    )  # fmt: skip
    assert case_of(parse_config(config.model_dump(exclude_none=True)), 8).layout == layout


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_transfer_never_takes_negative_time(tensor: int) -> None:
    """Samples can make a product's pieces cheaper than the whole; that is no transfer's gain."""
    layout = Layout(tensor=tensor, pipeline=4, virtual=6, data=16 // tensor, micro_batch_size=4)
    job, software = Job(MEGASCALE, 256, 2048), Software(tensor_overlap="chunked")
    prices = price(Case(job, replace(layout, schedule="interleaved_1f1b"), software), H200)
    for chunk in prices.chunks:
        for spent in (chunk.forward, chunk.backward_input, chunk.backward_weight):
            assert spent.tensor_s >= 0.0
