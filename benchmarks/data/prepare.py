"""Text to token files: `megascale data prepare` against `tokenizers` and Megatron-LM's tool.

    python -m benchmarks.data.prepare [--text PATH ...] [--megatron CHECKOUT] [--rounds N]
                                      [--output FILE] [--commit HASH]

One `.jsonl` of the texts (the standard library's sources, tests and all, unless named) and one
tokenizer of 32,768 entries are made once. Then every system runs as a process of its own, started
anew, in turn, on the same cores; the time is from its start to its end. Before that each runs once:
all .bin files must be equal, byte for byte, or nothing is timed. That run is looked at ten times a
second for its memory (PSS of all its processes), which costs it time and is why it is not counted.

Systems:
    megascale   `megascale data prepare`, nothing held out
    tokenizers  `benchmarks/data/plain.py`: `encode_batch_fast` on all cores
    megatron    tools/preprocess_data.py of a checkout, with as many workers as cores
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from megascale.data.tokenizer import train_bpe
from megascale.env import installed_versions
from megascale.train.bench.rows import Origin
from megascale.train.bench.start import reproducible

VOCAB_SIZE = 32_768
_SAMPLE_BYTES = 8 << 20


@dataclass(frozen=True)
class System:
    """command   writes its token file
    made      that file, without .bin; in a folder of its own, which is new for each run
    """

    name: str
    command: list[str]
    made: Path
    env: dict[str, str]


@dataclass(frozen=True)
class Corpus:
    """One file of lines of JSON and the tokenizer."""

    text: Path
    tokenizer: Path
    num_documents: int
    text_bytes: int


def main() -> None:
    """Compare the values, then the times; print a table and append a row a system."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)
    command = shlex.join(["python", "-m", "benchmarks.data.prepare", *reproducible(sys.argv[1:])])
    origin = Origin.here(
        num_ranks=0, on_gpus=False, command=command, given_commit=arguments.commit or None
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = _make_corpus(Path(folder), arguments.text)
        systems = _systems(Path(folder), corpus, len(cores), arguments)
        peak_mib = _compare(systems)
        load = os.getloadavg()[0]
        times: dict[str, list[float]] = {system.name: [] for system in systems}
        for number in range(arguments.rounds):
            for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
                times[system.name].append(_timed(system))
    lines = _lines(corpus, times, peak_mib, len(cores), load)
    write_rows(lines, origin, arguments.output, bench="data")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, nargs="+", help="folders or files of text")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, help="what it runs with")
    parser.add_argument("--megatron-arguments", default="", help="more of them")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    if arguments.megatron and not (arguments.megatron / "tools/preprocess_data.py").is_file():
        parser.error(f"{arguments.megatron} has no tools/preprocess_data.py")
    return arguments


def _texts(named: list[Path] | None) -> Iterator[str]:
    if named is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    else:
        files = [p for name in named for p in (name.rglob("*") if name.is_dir() else [name])]
    for path in sorted(files):
        if path.is_file():
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if text:
                yield text


def _make_corpus(folder: Path, named: list[Path] | None) -> Corpus:
    texts = list(_texts(named))
    sizes = [len(text.encode()) for text in texts]
    every = max(1, sum(sizes) // _SAMPLE_BYTES)
    corpus = Corpus(folder / "text.jsonl", folder / "tokenizer", len(texts), sum(sizes))
    with corpus.text.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    corpus.tokenizer.mkdir()
    train_bpe(texts[::every], VOCAB_SIZE).save(corpus.tokenizer)
    return corpus


def _systems(
    folder: Path, corpus: Corpus, num_cores: int, arguments: argparse.Namespace
) -> list[System]:
    ours, plain, theirs = (folder / name / "out" for name in ("megascale", "plain", "megatron"))
    python = [sys.executable, "-m"]
    options = ["--validation-fraction", "0", "--workers", str(num_cores)]
    named = ["--input", str(corpus.text), "--tokenizer", str(corpus.tokenizer)]
    systems = [
        System(
            "megascale",
            [*python, "megascale", "data", "prepare", *named, "--output", str(ours), *options],
            ours / "train",
            {},
        ),
        System(
            "tokenizers",
            [*python, "benchmarks.data.plain", *map(str, (corpus.text, corpus.tokenizer, plain))],
            plain,
            {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_cores)},
        ),
    ]
    if arguments.megatron:
        tool = [arguments.megatron_python, str(arguments.megatron / "tools/preprocess_data.py")]
        model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
        work = ["--append-eod", "--workers", str(num_cores), "--output-prefix", str(theirs)]
        more = shlex.split(arguments.megatron_arguments)
        systems.append(
            System(
                "megatron",
                [*tool, "--input", str(corpus.text), *model, str(corpus.tokenizer), *work, *more],
                theirs.with_name("out_text_document"),
                {"TOKENIZERS_PARALLELISM": "false"},
            )
        )
    return systems


def _compare(systems: list[System]) -> dict[str, float]:
    """Peak memory of each in MiB. Ends the program where their tokens differ."""
    peaks, made = {}, {}
    for system in systems:
        with _started(system) as process:
            peaks[system.name] = _peak_mib(process)
        _require_success(system, process)
        made[system.name] = Path(f"{system.made}.bin").read_bytes()
        if made[system.name] != made["megascale"]:
            raise SystemExit(f"{system.name} made other tokens; nothing is timed")
    return peaks


def _timed(system: System) -> float:
    start = time.monotonic()
    with _started(system) as process:
        process.wait()
    elapsed_s = time.monotonic() - start
    _require_success(system, process)
    return elapsed_s


def _started(system: System) -> subprocess.Popen[bytes]:
    folder = system.made.parent.parent if system.name == "megascale" else system.made.parent
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir()
    log = (folder.parent / f"{system.name}.log").open("wb")
    with log:
        return subprocess.Popen(
            system.command, env={**os.environ, **system.env}, stdout=log, stderr=log
        )


def _require_success(system: System, process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        folder = system.made.parent.parent if system.name == "megascale" else system.made.parent
        log = (folder.parent / f"{system.name}.log").read_text(errors="replace")
        raise SystemExit(f"{system.name} ended with {process.returncode}: {log[-2000:]}")


def _peak_mib(process: subprocess.Popen[bytes]) -> float:
    peak_bytes = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for member in [root, *_children(root)]:
            try:
                total += member.memory_full_info().pss
            except psutil.Error:
                continue  # it just ended
        peak_bytes = max(peak_bytes, total)
        time.sleep(0.1)
    return peak_bytes / 2**20


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def _lines(
    corpus: Corpus,
    times: dict[str, list[float]],
    peak_mib: dict[str, float],
    num_cores: int,
    load: float,
) -> list[Line]:
    rate = {
        name: corpus.text_bytes / 1e6 / statistics.median(values) for name, values in times.items()
    }
    rivals = {name: value for name, value in rate.items() if name != "megascale"}
    lines = []
    for name, values in times.items():
        more = {
            "seconds": statistics.median(values),
            "peak_mib": peak_mib[name],
            "text_mb": corpus.text_bytes / 1e6,
            "documents": corpus.num_documents,
            "load_before": load,
            "tools": installed_versions(("tokenizers", "numpy")),
            "stats": {"rounds": len(values), "min": min(values), "max": max(values)},
        }
        if name == "megascale":
            more["baselines"] = rivals
        lines.append(
            Line(
                {"line": "prepare", "system": name, "cores": num_cores},
                "MB/s",
                rate[name],
                (">=", max(rivals.values())) if name == "megascale" else None,
                more,
            )
        )
        print(f"{name:12} {more['seconds']:.2f} s, peak {peak_mib[name]:.0f} MiB")
    return lines


if __name__ == "__main__":
    main()
