"""What a rank can be asked to record while it trains: spans, a torch profile, its memory's history.

A profiler is begun before a step and ended behind one, on the loop's thread, and writes its file on
another: writing takes longer than a step. Beginning and ending cost what they cost (CUPTI starts in
seconds, and a GPU is waited for); they are the only places where a request slows the run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from megascale.errors import ConfigError
from megascale.telemetry.recorder import Recorder
from megascale.telemetry.requests import profile_folder

# Frames of Python only; an event of the history is a few KB of host memory.
_MOST_MEMORY_EVENTS = 200_000


class Profiler(Protocol):
    """Records from `begin` to `end`."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def write(self) -> Path:
        """The file, complete."""


Make = Callable[[str, int], Profiler]
"""Makes a profiler for a request's name and number of steps. ConfigError: not on this rank."""


def profilers(
    run_dir: Path, recorder: Recorder, device: torch.device, line_file: Path
) -> Mapping[str, Make]:
    """What this rank can record, by the request's `what`."""
    on_cuda = device.type == "cuda"

    def file(name: str, ending: str) -> Path:
        return profile_folder(run_dir, name) / f"rank_{recorder.rank:05d}{ending}"

    def spans(_name: str, num_steps: int) -> Profiler:
        return Spans(recorder, num_steps, line_file)

    def torch_profile(name: str, _num_steps: int) -> Profiler:
        return TorchProfile(file(name, ".trace.json.gz"), on_cuda=on_cuda)

    def memory(name: str, _num_steps: int) -> Profiler:
        if not on_cuda:
            raise ConfigError(
                "this rank trains on a CPU, whose allocator keeps no history; ask a run on GPUs"
            )
        return MemoryHistory(file(name, ".pickle"))

    return {"spans": spans, "torch": torch_profile, "memory": memory}


class Spans:
    """The recorder's spans of every step, into the rank's line file."""

    def __init__(self, recorder: Recorder, num_steps: int, line_file: Path) -> None:
        self._recorder, self._num_steps, self._line_file = recorder, num_steps, line_file

    def begin(self) -> None:
        self._recorder.request_spans(self._num_steps)

    def end(self) -> None:
        pass

    def write(self) -> Path:
        """They come when the device has passed them, some steps later."""
        return self._line_file


class TorchProfile:
    """A window of torch.profiler: every operator of the host, every kernel of the device."""

    def __init__(self, path: Path, *, on_cuda: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        self._path, self._on_cuda = path, on_cuda
        self._profile = profile(activities=activities)

    def begin(self) -> None:
        self._profile.start()

    def end(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()  # what was launched in the window is part of it
        self._profile.stop()

    def write(self) -> Path:
        with _aside(self._path) as aside:
            self._profile.export_chrome_trace(str(aside))
        return self._path


class MemoryHistory:
    """Every allocation of the window with its stack, for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._snapshot: Any = None

    def begin(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS, stacks="python")

    def end(self) -> None:
        self._snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    def write(self) -> Path:
        write_snapshot(self._path, self._snapshot)
        return self._path


def write_snapshot(path: Path, snapshot: Any) -> None:
    """A snapshot of the allocator as the viewer reads it."""
    with _aside(path) as aside:
        aside.write_bytes(pickle.dumps(snapshot))


class _aside:
    """A path beside `path`, which takes its place if nothing fails."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f".{path.name}")  # same ending: it is read

    def __enter__(self) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._aside

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._aside.replace(self._path)
        else:
            self._aside.unlink(missing_ok=True)
