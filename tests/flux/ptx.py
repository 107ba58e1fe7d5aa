"""What compiled kernels use, and in which order their instructions run, read from PTX and cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """A thread's registers and bytes of stack (spilled registers are there), a program's shared
    memory in bytes."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def usage(compiled: Any) -> Usage:
    """What ptxas made of a kernel."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared)


def branching(ptx: str) -> str:
    """PTX of a warp-specialised kernel with the jump to a warp's role as branches, which
    `always_precede` follows."""
    jump = r"\$L_brx_\d+: \.branchtargets\s*((?:\$\w+,?\s*)+);\s*brx\.idx[^;]*;"

    def branches(found: re.Match[str]) -> str:
        return "\n".join(f"@%p0 bra {label};" for label in re.findall(r"\$\w+", found[1]))

    ptx, count = re.subn(jump, branches, ptx)
    assert count == 1
    return ptx


def always_precede(ptx: str, first: str, then: str, last: str) -> bool:
    """Whether on every path to an instruction that matches `last` there was one that matches
    `first` and after it one that matches `then`, both since the previous `last`.

    A `first` that follows a `then` needs another `then`. All three are regular expressions. False
    where no path reaches `last`.
    """
    blocks = _blocks(ptx)
    reached: dict[str, set[int]] = {label: set() for label in blocks}
    seen_at_last: set[int] = set()
    work = [(next(iter(blocks)), 0)]
    while work:
        label, state = work.pop()
        if state in reached[label]:
            continue
        reached[label].add(state)
        lines, following = blocks[label]
        for line in lines:
            if re.search(last, line):
                seen_at_last.add(state)
                state = 0
            elif re.search(first, line):
                state = 1
            elif state == 1 and re.search(then, line):
                state = 2
        work += [(block, state) for block in following]
    return seen_at_last == {2}


def _blocks(ptx: str) -> dict[str, tuple[list[str], list[str]]]:
    """Instructions and successors of each basic block, the entry first."""
    blocks: dict[str, tuple[list[str], list[str]]] = {"entry": ([], [])}
    label, open_end = "entry", True
    for line in map(str.strip, ptx.splitlines()):
        begins = re.match(r"(\$\w+):", line)
        branch = re.search(r"(@!?%p\d+ )?bra(?:\.uni)?\s+(\$\w+);", line)
        if begins:
            if open_end:
                blocks[label][1].append(begins[1])
            label, open_end = begins[1], True
            blocks[label] = ([], [])
        elif branch:
            blocks[label][1].append(branch[2])
            if branch[1] is None:
                open_end = False
                label = f"after {len(blocks)}"
                blocks[label] = ([], [])
            else:
                after = f"after {len(blocks)}"
                blocks[label][1].append(after)
                label, open_end = after, True
                blocks[label] = ([], [])
        elif line.startswith("ret;"):
            open_end = False
        elif line and not line.startswith(("//", ".")):
            blocks[label][0].append(line)
    return blocks
