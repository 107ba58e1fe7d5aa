"""Rows of a CSV of measured runs (`--data FILE`) as cases: vTrain's and MosaicML's sets.

The file is not part of this repository. Its columns: system, model, layers, hidden, heads,
kv_heads, ffn, vocab, seq, gpu, n_gpus, tp, pp, vpp, dp, zero, mbs, gbs, recompute, precision,
iter_s, source; an empty cell is not stated. Rows of other systems, and those whose device has no
cluster file, are counted and left out.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.plan.case import Case, Job, Layout
from megascale.plan.machine.cluster import Cluster
from megascale.plan.validate.machines import Machines
from megascale.plan.validate.rows import Row
from megascale.plan.validate.systems import SYSTEMS

NEEDED = (
    "system", "model", "layers", "hidden", "heads", "vocab", "seq", "gpu", "n_gpus", "tp", "pp",
    "dp", "mbs", "gbs", "recompute", "precision", "iter_s", "source",
)  # fmt: skip
Cells = Mapping[str, str]


@dataclass
class External:
    """What was read: rows by set, and how many rows were left out, by reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def of(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.set == name]


def read_external(path: Path, machines: Machines) -> External:
    """The rows of `path` that can be predicted. Raises ConfigError naming the line that is bad."""
    found = External()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path}: columns {', '.join(missing)} are missing; give a CSV with a header "
                    f"line that has {', '.join(NEEDED)}"
                )
            for cells in reader:
                _add(found, cells, machines, f"{path}, line {reader.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"measured runs {path} cannot be read: {error}") from None
    return found


def _add(found: External, cells: Cells, machines: Machines, place: str) -> None:
    name, reason = _set_of(cells)
    if name is None:
        found.left_out[reason] += 1
        return
    try:
        found.rows.append(_READERS[name](cells, machines))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{place}: {error}; correct the row, or remove it") from None


def _set_of(cells: Cells) -> tuple[str | None, str]:
    """The set of a row, else why it is left out."""
    if not cells["iter_s"]:
        return None, "no time is stated"
    if "vTrain" in cells["source"] or "vTrain" in cells["system"]:
        return "vtrain", ""
    if "llm-foundry" in cells["system"]:
        if "fp8" in cells["precision"]:
            return None, "fp8: no cluster file has its rates"
        return "mosaicml", ""
    return None, f"of {cells['system'] or 'no named system'}: not a set of this validation"


def _vtrain(cells: Cells, machines: Machines) -> Row:
    """Megatron-DeepSpeed: everything recomputed, all-reduces, 1F1B; four 200 Gb/s NICs a node."""
    model = _model(cells, {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
                           "bias": "all", "tie_embeddings": True, "hidden_dropout": 0.1,
                           "attention_dropout": 0.1})  # fmt: skip
    layout = _layout(cells, zero_stage=0)
    return _row("vtrain", "megatron-2021", cells, model, layout, machines.a100_half_network)


def _mosaicml(cells: Cells, machines: Machines) -> Row:
    """FSDP: MPT without dropout or biases, ALiBi in the attention kernel."""
    model = _model(cells, {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
                           "bias": "none", "tie_embeddings": True})  # fmt: skip
    stage = 3 if cells.get("zero") == "3" else 2
    is_h100 = cells["gpu"].startswith("H100")
    cluster = machines.h100_triton if is_h100 else machines.a100_triton
    return _row("mosaicml", "fsdp", cells, model, _layout(cells, zero_stage=stage), cluster)


_READERS: dict[str, Callable[[Cells, Machines], Row]] = {"vtrain": _vtrain, "mosaicml": _mosaicml}


def _row(
    name: str, system: str, cells: Cells, model: ModelConfig, layout: Layout, cluster: Cluster
) -> Row:
    case = Case(Job(model, _number(cells, "gbs"), _number(cells, "seq")), layout, SYSTEMS[system])
    if layout.num_devices != _number(cells, "n_gpus"):
        raise ValueError(
            f"tp {layout.tensor} x pp {layout.pipeline} x dp {layout.data} is "
            f"{layout.num_devices} devices, n_gpus says {cells['n_gpus']}"
        )
    if case.job.global_batch_size % (layout.micro_batch_size * layout.data):
        raise ValueError(f"gbs {cells['gbs']} is not a multiple of mbs x dp")
    label = (
        f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data} mbs {layout.micro_batch_size} "
        f"seq {case.job.seq_len} {cells['gpu'].split(' ')[0]}"
    )
    return Row(
        name,
        system,
        cells["model"],
        label,
        case,
        cluster,
        float(cells["iter_s"]),
        cells["source"],
    )


def _model(cells: Cells, more: dict[str, Any]) -> ModelConfig:
    heads = _number(cells, "heads")
    return ModelConfig.model_validate(
        {
            "num_layers": _number(cells, "layers"),
            "hidden_size": _number(cells, "hidden"),
            "num_heads": heads,
            "num_kv_heads": _number(cells, "kv_heads", heads),
            "ffn_hidden_size": _number(cells, "ffn", 4 * _number(cells, "hidden")),
            "vocab_size": _number(cells, "vocab"),
            "max_seq_len": _number(cells, "seq"),
            **more,
        }
    )


def _layout(cells: Cells, zero_stage: int) -> Layout:
    virtual = _number(cells, "vpp", 1)
    pipeline = _number(cells, "pp")
    if cells["recompute"] not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {cells['recompute']!r}; legal: none, selective, full")
    return Layout(
        tensor=_number(cells, "tp"),
        pipeline=pipeline,
        virtual=virtual if pipeline > 1 else 1,
        data=_number(cells, "dp"),
        micro_batch_size=_number(cells, "mbs"),
        zero_stage=cast(Literal[0, 1, 2, 3], zero_stage),
        recompute=cast(Literal["none", "selective", "full"], cells["recompute"]),
        schedule="interleaved_1f1b" if virtual > 1 and pipeline > 1 else "1f1b",
    )


def _number(cells: Cells, name: str, default: int | None = None) -> int:
    """The whole number that a cell begins with ("51200 (assumed)")."""
    text = (cells.get(name) or "").strip()
    if not text and default is not None:
        return default
    found = re.match(r"\d+", text)
    if found is None:
        raise ValueError(f"{name} is {text!r}; a whole number is needed")
    return int(found.group())
