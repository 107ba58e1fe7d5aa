"""The recorder around a training loop that knows nothing of megascale.

    python examples/spans_around_a_loop.py FOLDER

Every step's time by name goes to `FOLDER/telemetry/rank_00000.jsonl`, the single spans of every
fourth step too; the recorder never waits for the device. On a GPU hand in `CudaEventClock()`
(`megascale/parallel/clock.py`) in place of `MonotonicClock()`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from megascale.events import Sums, read_events
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.writer import LineWriter, line_file

STEPS = 8


def train(recorder: Recorder) -> None:
    """An ordinary loop; the `with` lines are all that is added."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        with recorder.step(step):
            with recorder.span("data_wait", host=True):
                inputs = torch.randn(256, 16)
            with recorder.span("forward"):
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            with recorder.span("backward"):
                loss.backward()
            with recorder.span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    if len(sys.argv) != 2:
        print("usage: python examples/spans_around_a_loop.py FOLDER", file=sys.stderr)
        sys.exit(2)
    path = line_file(Path(sys.argv[1]), rank=0)
    with LineWriter(path) as lines:
        recorder = Recorder(MonotonicClock(), lines, span_interval=4)
        train(recorder)
        recorder.close()

    total_ns: Counter[str] = Counter()
    for event in read_events(path):
        if isinstance(event, Sums):
            total_ns.update({name: times["total_ns"] for name, times in event.sums.items()})
    for name, ns in total_ns.most_common():
        print(f"{name:10} {ns / STEPS / 1e6:8.3f} ms a step")
    print(f"events: {path}")


if __name__ == "__main__":
    main()
