"""Five faults in real training runs on this machine, and what `megascale diagnose` says of each.

    python examples/worked_cases.py slow_node | late_launcher | hang | memory_pressure
    python examples/worked_cases.py network_congestion [--folder FOLDER]

Four ranks train a tiny model on CPU; one of them has a fault from some step on, ordered as
`megascale chaos` orders them (`megascale/train/faults.py`). Then the readers are asked, as a person
would ask them, and the program ends with 0 only if they name what was planted. The congestion is
that of a tree like /sys, which this program writes while `megascale monitor` samples it: no machine
here has a switch to congest. docs/diagnosis.md walks through the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 4
GUILTY = 2
TINY = (
    "data.synthetic=true",
    "data.path=''",
    "validation.interval=0",
    "checkpoint.enable=false",
    "metrics.tensorboard=false",
    "metrics.log_interval=10",
    "model.vocab_size=256",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "parallelism.tensor_parallel_size=1",
    "training.seq_len=64",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
)


@dataclass(frozen=True)
class Case:
    """order     the fault of rank GUILTY, as in a file of orders
    settings  of the run, beside TINY
    readers   whom to ask
    wanted    a word of the first reader's sentence that names what was planted
    """

    told: str
    order: dict[str, object]
    settings: Sequence[str]
    readers: Sequence[str]
    wanted: str


CASES = {
    "slow_node": Case(
        "rank 2 computes for 40 % longer from step 20 on",
        {"kind": "slow", "step": 20, "share": 0.4, "steps": 1_000_000},
        ("training.steps=150",),
        ("stragglers", "heat_map", "what_if"),
        f"rank {GUILTY}",
    ),
    "late_launcher": Case(
        "rank 2 collects garbage among a million objects in each step from step 20 on",
        {"kind": "garbage", "step": 20, "steps": 1_000_000, "objects": 1_000_000},
        ("training.steps=150", "telemetry.span_interval=2"),
        ("late", "drift"),
        f"rank {GUILTY}",
    ),
    "hang": Case(
        "rank 2 is stopped in step 20",
        {"kind": "sleep", "step": 20},
        ("training.steps=1000", "telemetry.ongoing_after_s=2"),
        ("hang",),
        f"rank {GUILTY}",
    ),
    "memory_pressure": Case(
        "rank 2 holds 2 MiB more after each step from step 20 on",
        {"kind": "leak", "step": 20, "steps": 1_000_000, "megabytes": 2},
        ("training.steps=200", "telemetry.memory_interval=10"),
        ("memory",),
        f"rank {GUILTY}",
    ),
}


def trained(case: Case, folder: Path) -> Path:
    """The run folder, when the run has ended or is known to hang."""
    orders, run_dir = folder / "orders.json", folder / "run"
    orders.write_text(json.dumps([{"id": "1", "ranks": [GUILTY], **case.order}]))
    command = [sys.executable, "-m", "megascale", "train", str(ROOT / "recipes/first-run.toml")]
    command += ["--nproc", str(NUM_RANKS)]
    for setting in (*TINY, *case.settings, f"job.run_dir={run_dir}"):
        command += ["--set", setting]
    environment = {**os.environ, "MEGASCALE_FAULT": str(orders), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        while process.poll() is None and not _recorded_hang(run_dir):
            time.sleep(0.2)
        if process.poll() is None:  # ranks in a hang end by no request, nor with their parent
            os.killpg(process.pid, signal.SIGKILL)
    return run_dir


def _recorded_hang(run_dir: Path) -> bool:
    """All ranks but one have written what they wait in."""
    files = list((run_dir / "telemetry").glob("rank_*.jsonl"))
    said = sum('"kind":"ongoing"' in file.read_text() for file in files)
    return said >= NUM_RANKS - 1


def congested(folder: Path) -> Path:
    """A run folder with two seconds of four ports, of which one moves a third and is marked."""
    run_dir, root = folder / "run", folder / "sys"
    _train_a_little(run_dir)
    ports = [root / f"class/infiniband/mlx5_{number}/ports/1" for number in range(4)]
    for port in ports:
        (port / "counters").mkdir(parents=True)
        (port / "hw_counters").mkdir()
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "state").write_text("4: ACTIVE\n")
        for name in ("counters/port_xmit_data", "counters/port_rcv_data"):
            (port / name).write_text("0\n")
        (port / "hw_counters/np_ecn_marked_roce_packets").write_text("0\n")
    ended = threading.Event()
    traffic = threading.Thread(target=_move, args=(ports, ended))
    traffic.start()
    try:
        _megascale("monitor", str(run_dir), "--seconds", "2", "--root", str(root))
    finally:
        ended.set()
        traffic.join()
    return run_dir


def _move(ports: Sequence[Path], ended: threading.Event) -> None:
    """Bursts of 50 ms at the link's speed; counters count words of four bytes."""
    begin_s, sent = time.monotonic(), [0.0] * len(ports)
    before_s, marks = begin_s, 0
    while not ended.wait(0.001):
        now_s = time.monotonic()
        if int((now_s - begin_s) / 0.05) % 2 == 0:
            marks += 20
            for number, port in enumerate(ports):
                share = 1 / 3 if number == GUILTY else 0.98
                sent[number] += share * 50e9 * (now_s - before_s)
                for name in ("port_xmit_data", "port_rcv_data"):
                    _count(port / "counters" / name, int(sent[number] / 4))
            marked = ports[GUILTY] / "hw_counters/np_ecn_marked_roce_packets"
            _count(marked, marks)
        before_s = now_s


def _count(file: Path, number: int) -> None:
    """In place, as the kernel does: whoever samples keeps the file open."""
    with file.open("r+") as counter:
        counter.write(f"{number}\n")


def _train_a_little(run_dir: Path) -> None:
    settings = (*TINY, "training.steps=5", f"job.run_dir={run_dir}")
    flags = [word for setting in settings for word in ("--set", setting)]
    _megascale("train", str(ROOT / "recipes/first-run.toml"), *flags)


def _megascale(*arguments: str) -> str:
    command = [sys.executable, "-m", "megascale", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=[*CASES, "network_congestion"])
    parser.add_argument("--folder", type=Path, help="new, and kept; default: a temporary one")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix=f"{arguments.case}-"))
    folder.mkdir(parents=True, exist_ok=True)
    readers: Sequence[str]
    if arguments.case == "network_congestion":
        told, readers, wanted = "port mlx5_2 is congested", ("network",), "mlx5_2"
        make: Callable[[], Path] = lambda: congested(folder)  # noqa: E731
    else:
        case = CASES[arguments.case]
        told, readers, wanted = case.told, case.readers, case.wanted
        make = lambda: trained(case, folder)  # noqa: E731
    print(f"planted: {told}", flush=True)
    run_dir = make()
    answers = []
    for reader in readers:
        print(f"\n$ megascale diagnose {run_dir} {reader}", flush=True)
        answers.append(_megascale("diagnose", str(run_dir), reader))
        print(answers[-1], end="", flush=True)
    summary = json.loads(_megascale("diagnose", str(run_dir), readers[0], "--json"))
    found = summary["level"] != "ok" and wanted in summary["summary"].lower()
    print(f"\n{'found' if found else 'NOT found'}: {summary['summary']}")
    print(f"the run is in {run_dir}; see it: megascale dashboard {run_dir}")
    sys.exit(0 if found else 1)


if __name__ == "__main__":
    main()
