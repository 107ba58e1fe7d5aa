"""The loader of a node: tokens a second on one core, and what a rank's wait costs.

    python -m benchmarks.data.loading [--seq-len 2048 8192] [--seconds 5] [--output FILE]
                                      [--commit HASH]

A token file of random ids (packing concat, uint16, in the page cache) is read by the real process
into the real ring; a rank that only copies keeps it at work. Tokens are divided by the seconds of
the loader's CPU that the kernel counts, so that a busy machine does not change the figure: it is
what one core does. Beside it, also by CPU seconds, what the rank that copies spends a batch, and
both ends while they wait for a batch that does not come (pauses of at most 2 ms).

Baseline: the same samples through `GlobalBatchLoader`, as each rank reads them for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from megascale.config import RunConfig, load_config
from megascale.data import GlobalBatchLoader, IndexedWriter
from megascale.data.node.filling import training_positions
from megascale.data.node.node import NodeLoader
from megascale.data.node.shape import RingShape
from megascale.data.node.source import NodeBatches, NodeMemory
from megascale.data.node.waiting import wait_until
from megascale.data.opening import open_order
from megascale.data.prepared import FORMAT_VERSION, Meta, SplitMeta
from megascale.train.bench.rows import Origin
from megascale.train.bench.start import reproducible

NUM_TOKENS = 50_000_000
VOCAB_SIZE = 50_000
BATCH = 64


def prepared(folder: Path) -> Path:
    """A prepared folder of random ids, in documents of 10,000 tokens, without a tokenizer."""
    random = np.random.default_rng(1)
    lengths = np.full(NUM_TOKENS // 10_000, 10_000)
    with IndexedWriter(folder / "train", VOCAB_SIZE) as writer:
        writer.add(random.integers(1, VOCAB_SIZE, NUM_TOKENS, dtype=np.uint16), lengths)
    Meta(
        format_version=FORMAT_VERSION,
        tokenizer_sha256="",
        vocab_size=VOCAB_SIZE,
        end_of_document_id=0,
        splits={"train": SplitMeta(NUM_TOKENS, len(lengths))},
        unigram_entropy_nats=1.0,
        valid_unigram_cross_entropy_nats=None,
        skipped_undecodable=0,
        skipped_empty=0,
        source_files=1,
        documents_sha256="",
        seed=0,
        validation_fraction=0.0,
        command="",
    ).write(folder)
    return folder


def configuration(folder: Path, seq_len: int, document_mask: bool) -> RunConfig:
    return load_config(
        None,
        [
            f"data.path={folder}",
            f"model.vocab_size={VOCAB_SIZE}",
            f"training.seq_len={seq_len}",
            f"training.global_batch_size={BATCH}",
            f"data.document_mask={str(document_mask).lower()}",
        ],
    )


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(config: RunConfig, seconds: float) -> dict[str, float]:
    seq_len = config.training.seq_len
    shape = RingShape(3, 1, (0,), 1, 1, BATCH, seq_len, config.data.document_mask)
    loader = NodeLoader(config, [("train", shape)])
    memory = NodeMemory(loader.place, [shape], [0], deadline_s=60.0, ended=loader.ended)
    loader.seek(0, 1, 0)
    positions = training_positions(lambda _: BATCH, 0)
    source = NodeBatches(memory, memory.rings[0], 1, positions, global_rank=0, dp_rank=0)
    list(islice(source, 6))  # imports and first pages are behind
    pid, own = loader.place.loader, os.getpid()
    at, begun, num = (cpu_s(pid), cpu_s(own)), time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        next(source)
        num += 1
    spent = cpu_s(pid) - at[0]
    copying = cpu_s(own) - at[1]
    found = {
        "loader_tokens_per_core_s": num * BATCH * seq_len / spent,
        "rank_ms_per_batch": 1e3 * copying / num,
        "batch_mb": BATCH * 4 * seq_len / 1e6,
    }
    time.sleep(0.5)
    at, begun = (cpu_s(pid), cpu_s(own)), time.monotonic()
    wait_until(lambda: time.monotonic() - begun > seconds, lambda _: None)
    elapsed = time.monotonic() - begun
    found["idle_loader_core"] = (cpu_s(pid) - at[0]) / elapsed
    found["waiting_rank_core"] = (cpu_s(own) - at[1]) / elapsed
    memory.close()
    loader.close()
    found["rank_loader_tokens_per_core_s"] = _by_itself(config, seconds)
    return found


def _by_itself(config: RunConfig, seconds: float) -> float:
    own = GlobalBatchLoader(
        open_order(config, "train"),
        micro_batch_size=1,
        dp_rank=0,
        dp_size=1,
        batch_size_at=lambda _: BATCH,
        prefetch=0,
    )
    at, begun, num = time.process_time(), time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        own.read(num * BATCH, BATCH)
        num += 1
    spent = time.process_time() - at
    own.close()
    return num * BATCH * config.training.seq_len / spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.data.loading", *reproducible(sys.argv[1:])])
    commit = arguments.commit or None
    origin = Origin.here(num_ranks=0, on_gpus=False, command=command, given_commit=commit)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        prepared(Path(folder))
        for seq_len in arguments.seq_len:
            for mask in (False, True):
                config = configuration(Path(folder), seq_len, mask)
                found = measure(config, arguments.seconds)
                value = found.pop("loader_tokens_per_core_s")
                case = {"line": "node loader", "seq_len": seq_len, "document_mask": mask}
                lines.append(Line(case, "tokens_per_core_s", value, more=found))
                print(json.dumps(case | found))
    write_rows(lines, origin, arguments.output, bench="data")


if __name__ == "__main__":
    main()
