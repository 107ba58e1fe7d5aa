"""Rows of the results from what was measured (form: `benchmarks/README.md`)."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megascale.env import installed_versions
from megascale.flux.bench.cases import Case
from megascale.flux.bench.measure import Measured
from megascale.flux.bench.summary import Result
from megascale.flux.bench.targets import (
    Target,
    best_alternative,
    case_target,
    is_few_in_graph,
    is_met,
)
from megascale.flux.bench.world import World

Row = dict[str, Any]


class Origin:
    """What all rows of a run share: device, commit, versions, command."""

    def __init__(self, world: World, commit: str | None, command: str) -> None:
        name = torch.cuda.get_device_name(world.device) if world.on_cuda else "cpu"
        known = _git("rev-parse", "HEAD")
        self.fields: Row = {
            "device": name,
            "num_devices": world.size,
            "commit": commit or known or "unknown",
            "dirty": not commit and (not known or _git("status", "--porcelain") != ""),
            "versions": installed_versions(("torch", "triton")),
            "command": command,
        }

    def row(self, bench: str, case: Mapping[str, Any], metric: str, value: float) -> Row:
        """A row with what every row has; `target` and `met` are added by `judged`."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "bench": bench,
            "case": dict(case),
            "metric": metric,
            "value": value,
            **self.fields,
            "time": now,
        }


def judged(row: Row, target: Target | None) -> Row:
    """The row with its target and whether it is met."""
    return {**row, "target": target, "met": is_met(row["value"], target)}


def case_row(case: Case, found: Measured, world: World, origin: Origin, dtype: torch.dtype) -> Row:
    """The row of a case; times in ms, the slowest rank's median."""
    keys = case.keys(dtype)
    baselines = found.baselines
    row = origin.row("flux", keys, "ms", found.value)
    row |= {
        "baselines": baselines,
        "chosen": found.chosen.name,
        "chosen_config": found.chosen.label,
        "kernel_ms": found.forms.get("fused"),
        "own_gemm_ms": found.own_gemm_ms,
        "view_ms": found.view_ms,
        "efficiency": found.efficiency,
        "efficiency_own": found.efficiency_own,
        "over_gemm": found.value / found.gemm_ms,
        "over_best": best_alternative(baselines) / found.value,
        "over_nccl": found.forms["nccl"] / found.value,
        "host_us": found.host_us,
        "noise": found.noise,
        "forms": found.forms,
        "configs": found.configs,
        "excluded": found.excluded,
        "symmetric_bytes": world.symmetric_bytes(),
        "stats": {
            "rounds": found.num_rounds,
            "min": found.spread[0],
            "max": found.spread[1],
        },
    }
    row = judged(row, case_target(keys, baselines))
    if row["met"] and is_few_in_graph(keys) and found.view_ms is not None:
        row["met"] = found.view_ms <= best_alternative(baselines, views=True)
    return row


def summary_row(found: Result, origin: Origin, tp: int) -> Row:
    """The row of a line over cases."""
    case = {"line": found.line.name, "tp": tp, "mode": found.line.mode}
    row = origin.row("flux-summary", case, found.line.quantity.metric, found.value)
    row |= {"cases": found.num_cases, "worst": dict(found.worst)}
    return judged(row, found.line.target)


def append(path: Path, row: Row) -> None:
    """Add the row to the file; what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def newest(path: Path, origin: Origin, tp: int) -> list[Row]:
    """The newest row of each case in the file that was measured here: device, commit and tp."""
    found: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        same = all(row.get(key) == origin.fields[key] for key in ("device", "commit"))
        if same and row["bench"] == "flux" and row["case"]["tp"] == tp:
            found[json.dumps(row["case"], sort_keys=True)] = row
    return list(found.values())


def machine(device: torch.device) -> Row:
    """Driver, clocks, power and temperature of this rank's GPU: read, never changed."""
    facts = gpu_facts(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return {key: value for key, value in facts.items() if key != "name"}


def gpu_facts(gpu: str) -> Row:
    """Name, driver, clocks, power and temperature of a GPU, and NCCL's version.

    gpu  its UUID, or its number on this machine
    Asks the driver's library or nvidia-smi, and so makes no CUDA context, which takes 500 MB of the
    GPU. What neither knows is absent.
    """
    values = _nvml(gpu) or _nvidia_smi(gpu)
    return {**values, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _nvml(gpu: str) -> Row:
    """By the library, which takes 20 us; empty where there is none or it does not answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
        if gpu.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
        return {
            "name": _text(nvml.nvmlDeviceGetName(handle)),
            "driver_version": _text(nvml.nvmlSystemGetDriverVersion()),
            "clocks.sm": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "clocks.mem": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power.draw": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature.gpu": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
    except nvml.NVMLError:
        return {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _nvidia_smi(gpu: str) -> Row:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    found = _output(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    )
    values = map(str.strip, found.split(",") if found else [])
    return dict(zip(query.split(","), values, strict=False))


def _git(*arguments: str) -> str:
    extra = ["--untracked-files=no"] if arguments[0] == "status" else []
    return _output(["git", *arguments, *extra])


def _output(command: Sequence[str]) -> str:
    """What the command prints; nothing where it cannot run."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()
