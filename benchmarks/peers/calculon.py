"""Calculon (SC'23) on the printed steps, beside this planner: where its checkout is at hand.

    python -m benchmarks.peers.calculon CHECKOUT

It runs in a process of its own with its shipped A100 file, through its Python API, on Korthikanti's
Table 5 and MegaScale's Table 2, with the settings that its own validation uses for the first; for
the second micro-batch 1, the attention core recomputed and the optimizer sharded, and for MegaScale
fused activations, ring overlap of tensor and overlap of data parallelism: parallel blocks, windows
and embeddings are not in it. Nothing of it is in this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.plan.validate.machines import load_machines
from megascale.plan.validate.published import korthikanti_rows
from megascale.plan.validate.replay import replay
from megascale.plan.validate.rows import Row
from megascale.plan.validate.scale import predict_s

CHILD = """
import json, logging, sys, types
sys.modules.setdefault("pandas", types.ModuleType("pandas"))  # of a verb that is not used here
import calculon
from calculon.llm import Llm
from calculon.system import System
seconds = []
for application, execution in json.load(sys.stdin):
    model = Llm(Llm.Application(application), logging.getLogger())
    system = System(calculon.io.read_json_file(sys.argv[1]))
    try:
        model.compile(system, Llm.Execution.from_json(execution))
        model.run(system)
        seconds.append(model.get_total_time())
    except Llm.Error as error:
        print(error, file=sys.stderr)
        seconds.append(None)
json.dump(seconds, sys.stdout)
"""


def main() -> None:
    """Print both predictions beside what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, help="folder of a checkout of Calculon")
    checkout = parser.parse_args().checkout
    system = checkout / "systems" / "a100_80g.json"
    if not system.is_file():
        parser.error(f"{checkout} is no checkout of Calculon: it has no systems/a100_80g.json")
    machines = load_machines()
    rows = [row for row in korthikanti_rows(machines.a100) if row.case.layout.data == 1]
    rows += replay("table2", machines.paper)
    theirs = calculon_seconds(checkout, system, rows)
    print(f"{'set':12} {'system':18} {'GPUs':>6} {'measured':>9} {'here':>17} {'Calculon':>17}")
    errors: dict[str, list[tuple[float, float]]] = {}
    for row, seconds in zip(rows, theirs, strict=True):
        ours = predict_s(row)
        both = [ours / row.measured_s - 1, (seconds or float("nan")) / row.measured_s - 1]
        errors.setdefault(f"{row.set}, {row.system.split('-')[0]}", []).append((both[0], both[1]))
        print(
            f"{row.set:12} {row.system:18} {row.gpus:6} {row.measured_s:9.2f} "
            f"{ours:8.2f} {both[0]:+8.1%} {seconds or float('nan'):8.2f} {both[1]:+8.1%}"
        )
    for name, pairs in errors.items():
        here, peer = zip(*pairs, strict=True)
        print(f"{name}: here {_summary(here)}; Calculon {_summary(peer)}")


def calculon_seconds(checkout: Path, system: Path, rows: Sequence[Row]) -> list[float | None]:
    """Calculon's seconds a step; None where it refuses a row."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(system)],
        input=json.dumps([[_application(row), _execution(row)] for row in rows]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    if done.returncode != 0:
        raise SystemExit(f"Calculon failed:\n{done.stderr}")
    seconds: list[float | None] = json.loads(done.stdout)
    return seconds


def _application(row: Row) -> dict[str, Any]:
    model = row.case.job.model
    return {
        "hidden": model.hidden_size,
        "feedforward": model.ffn_size,
        "seq_size": row.case.job.seq_len,
        "attn_heads": model.num_heads,
        "attn_size": model.dim_per_head,
        "num_blocks": model.num_layers,
    }


def _execution(row: Row) -> dict[str, Any]:
    layout, software = row.case.layout, row.case.software
    is_table2, is_megascale = row.set == "table2", row.system == "megascale"
    across = layout.num_devices > 8
    full = layout.recompute == "full"
    return {
        "num_procs": layout.num_devices,
        "tensor_par": layout.tensor,
        "pipeline_par": layout.pipeline,
        "data_par": layout.data,
        "tensor_par_net": 0,
        "pipeline_par_net": int(across),
        "data_par_net": int(across),
        "batch_size": row.case.job.global_batch_size,
        "microbatch_size": layout.micro_batch_size,
        "datatype": "float16",
        "fused_activation": is_megascale,
        "attention_type": "multihead",
        "activation_recompute": "full" if full else "attn_only",
        "pipeline_interleaving": layout.virtual,
        "optimizer_sharding": is_table2,
        "tensor_par_comm_type": "rs_ag" if software.sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if is_megascale else "none",
        "seq_par_ag_redo": software.sequence_parallel,
        "data_par_overlap": is_megascale,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def _summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"mean {sum(sizes) / len(sizes):.2%}, worst {max(sizes):.1%}"


if __name__ == "__main__":
    main()
