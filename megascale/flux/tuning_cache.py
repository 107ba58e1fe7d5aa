"""What the tuner measured, in a JSON file that a user can ship with a model.

An entry belongs to a shape class on one kind of machine: device, torch, triton, operator, columns,
reduction, class of rows, world size, dtype, layout, and whether the call runs eagerly or in a CUDA
graph. Anything else has no entry, and no entry means the default rule (`default_rule.py`).

Invariant: reading never fails the program. A file that is missing is an empty cache; one that
cannot be read (cut short, of another format) is reported by a warning that says why, ignored, and
kept beside the new one when that is written. Writing is atomic: readers see one or the other.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

from megascale.env import installed_versions
from megascale.errors import FluxError
from megascale.flux.default_rule import Mode
from megascale.flux.problem import Layout, Op, Problem

logger = logging.getLogger(__name__)

FORMAT = 1


def m_class(m: int) -> int:
    """The class of m rows, named by its largest member: powers of two, from 8 on."""
    return max(8, 1 << (m - 1).bit_length()) if m > 1 else 1


@dataclass(frozen=True)
class Key:
    """The shape class of a call and the machine it runs on."""

    op: Op
    n: int  # columns of this rank; of several weights together
    k: int
    m_class: int
    world_size: int
    dtype: str
    layout: Layout
    mode: Mode
    device_name: str
    torch_version: str
    triton_version: str
    asked: str = ""  # form on request that was offered beside the others

    @classmethod
    def of(
        cls,
        problem: Problem,
        mode: Mode = "eager",
        *,
        num_columns: int | None = None,
        device: torch.device | None = None,
        asked: str = "",
    ) -> Key:
        """The key of a problem on this machine.

        num_columns  of all weights together, where there are several
        device       where it runs; without one the CPU
        """
        on_cuda = device is not None and device.type == "cuda"
        return cls(
            op=problem.op,
            n=problem.n if num_columns is None else num_columns,
            k=problem.k,
            m_class=m_class(problem.m),
            world_size=problem.world_size,
            dtype=str(problem.dtype).removeprefix("torch."),
            layout=problem.layout,
            mode=mode,
            device_name=torch.cuda.get_device_name(device) if on_cuda else "cpu",
            torch_version=torch.__version__,
            triton_version=_triton_version(),
            asked=asked,
        )

    @property
    def problem(self) -> Problem:
        """The largest problem of the class; what the default rule is asked about."""
        dtype = getattr(torch, self.dtype)
        return Problem(self.op, self.m_class, self.n, self.k, self.world_size, dtype, self.layout)


@dataclass(frozen=True)
class Choice:
    """A form, its configuration as plain values, and what every candidate took."""

    form: str
    config: dict[str, Any] | None = None
    ms: dict[str, float] = field(default_factory=dict)


_FIELDS = {f.name: f.type for f in dataclasses.fields(Key)}
_NUMBERS = frozenset(name for name, kind in _FIELDS.items() if kind == "int")


class TuningCache:
    """Choices by key, and the file they came from and go to (None: memory alone)."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._choices: dict[Key, Choice] = {}
        self._own: dict[Key, Choice] = {}  # measured by this process: they win when it saves

    @classmethod
    def load(cls, path: Path | str) -> TuningCache:
        """The cache of `path`. Never raises for what the file holds: see the module."""
        loaded = cls(path)
        loaded._choices, problem = _read(Path(path))
        if problem:
            logger.warning(
                "tuning cache %s %s; it is ignored, so shapes in it follow the default rule until "
                "they are tuned again",
                path,
                problem,
            )
        return loaded

    def __len__(self) -> int:
        return len(self._choices)

    def get(self, key: Key) -> Choice | None:
        return self._choices.get(key)

    def put(self, key: Key, choice: Choice) -> None:
        """Remember; `save` writes it."""
        self._choices[key] = self._own[key] = choice

    def entries(self) -> list[tuple[Key, Choice]]:
        """All of them; what rank 0 sends to the others."""
        return list(self._choices.items())

    def replace(self, entries: list[tuple[Key, Choice]]) -> None:
        """Hold these and nothing else; what another rank sent."""
        self._choices = dict(entries)

    def save(self) -> None:
        """Write what this process measured into the file, atomically, beside what is there.

        What came from elsewhere (the choices shipped with the package) is not copied into it.
        A file that holds something else is moved aside and kept. One rank calls this. Raises
        FluxError where there is no file and none can be written.
        """
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise IsADirectoryError("it is there, and no file")
            on_disk, problem = _read(self.path)
            if problem:
                kept = _unused(self.path)
                os.replace(self.path, kept)
                logger.warning("tuning cache %s %s; it was moved to %s", self.path, problem, kept)
            _write(self.path, {**on_disk, **self._own})
        except (OSError, ValueError) as error:
            raise FluxError(
                f"the tuning cache {str(self.path)!r} cannot be written ({error}); give the path "
                "of a file in a folder that this process may write, or "
                'tune="cache", which only reads'
            ) from None


def _unused(path: Path) -> Path:
    """A name beside `path` that nothing has."""
    names = (f"{path.name}.unreadable{number or ''}" for number in count())
    return next(kept for name in names if not (kept := path.with_name(name)).exists())


def _read(path: Path) -> tuple[dict[Key, Choice], str]:
    """(choices, what is wrong with the file). A missing file is empty and nothing is wrong."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON ({error})"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        return {}, f"has format {found!r} and this program reads {FORMAT}"
    try:
        return dict(_entry(entry) for entry in content["entries"]), ""
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return {}, f"has an entry that is none ({type(error).__name__}: {error})"


def _entry(entry: dict[str, Any]) -> tuple[Key, Choice]:
    found = {"asked": "", **entry["key"]}  # an entry without it: nothing was
    key = Key(**{name: found[name] for name in _FIELDS})
    for name in _FIELDS:
        if not isinstance(getattr(key, name), int if name in _NUMBERS else str):
            raise TypeError(f"{name} is {getattr(key, name)!r}")
    config = entry["config"]
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"config is {config!r}")
    ms = {str(name): float(value) for name, value in entry["ms"].items()}
    return key, Choice(str(entry["form"]), config, ms)


def _write(path: Path, choices: dict[Key, Choice]) -> None:
    entries = [
        {"key": _plain(key), "form": c.form, "config": c.config, "ms": c.ms}
        for key, c in sorted(choices.items(), key=lambda item: repr(item[0]))
    ]
    lines = ",\n".join(json.dumps(entry) for entry in entries)  # one a line: diffs stay readable
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)  # a temporary file is private; this one is shipped
    os.replace(file.name, path)


def _plain(key: Key) -> dict[str, Any]:
    """The fields of a key, without what it does not say."""
    return {name: value for name, value in asdict(key).items() if value != ""}


@cache
def _triton_version() -> str:
    return installed_versions(("triton",)).get("triton", "none")
