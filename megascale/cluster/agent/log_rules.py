"""What lines of a log mean, as data (MegaScale 4.2 filters keywords of the logs in the agent).

A rule is a kind of failure, the words that a line must have (found by plain search, about 1 GB/s),
and a pattern that the line must match besides. The first rule that matches speaks, so the special
ones come first. The words of the rules are those of torch, NCCL, gloo, CUDA and the kernel; a line
that only mentions a fault (a setting, a counter at 0, a retry that worked) must not match.

`kind` is that of `messages.Failure`; "network" is also what a rank sees of a peer that died.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_LINE = 2_000  # characters; what a line has beyond is not looked at

# Xids that a program of the user can cause by itself; every other one is the device's.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})


@dataclass(frozen=True)
class Rule:
    """One kind of line. `words`: one of them is in the line, as it is written."""

    name: str
    kind: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]

    def matches(self, line: str) -> bool:
        return any(word in line for word in self.words) and bool(self.pattern.search(line))


def _rule(name: str, kind: str, words: tuple[str, ...], pattern: str = "") -> Rule:
    return Rule(name, kind, words, re.compile(pattern))


_XIDS = "|".join(map(str, sorted(APPLICATION_XIDS)))

RULES = (
    # ---- memory
    _rule(
        "cuda_out_of_memory",
        "out_of_memory",
        ("out of memory", "cudaErrorMemoryAllocation"),
        r"CUDA out of memory\. Tried|CUDA error: out of memory|CUDA failure.*out of memory"
        r"|cudaErrorMemoryAllocation|OutOfMemoryError: ",
    ),
    _rule(
        "kernel_out_of_memory",
        "out_of_memory",
        ("ut of memory: Killed process", "oom-kill:constraint="),
    ),
    _rule(
        "host_out_of_memory",
        "out_of_memory",
        ("MemoryError", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc"),
        r"^(\w+\.)*_?\w*MemoryError(:|$)|Errno 12\] Cannot allocate|: Cannot allocate memory$"
        r"|DefaultCPUAllocator: can't allocate|'?std::bad_alloc",
    ),
    # ---- storage
    _rule(
        "disk_full",
        "disk_full",
        ("No space left on device", "Disk quota exceeded"),
        r"\[Errno (28|122)\]|(Error|error|failed|FAIL|cannot|could not).*"
        r"(No space left|Disk quota)|: (No space left on device|Disk quota exceeded)",
    ),
    _rule(
        "storage_error",
        "exception",
        ("Input/output error", "Stale file handle", "Read-only file system", "I/O error, dev "),
        r"\[Errno (5|116|30)\]|: (Input/output error|Stale file handle|Read-only file system)"
        r"|I/O error, dev \w+, sector",
    ),
    # ---- devices
    _rule("xid_application", "exception", ("NVRM: Xid (",), rf"NVRM: Xid \([^)]*\): ({_XIDS})\b"),
    _rule("xid", "device", ("NVRM: Xid (",), r"NVRM: Xid \([^)]*\): \d+"),
    _rule(
        "ecc",
        "device",
        ("ECC", "ecc"),
        r"[Uu]ncorrectable ECC error (encountered|detected|in)|CUDA error: uncorrectable ECC"
        r"|NVRM: .*(DBE|double bit)|EDAC MC\d+: \d+ UE ",
    ),
    _rule(
        "device_lost",
        "device",
        ("fallen off the bus", "GPU is lost", "no CUDA-capable device", "CUDA error: ", "NVLink"),
        r"GPU has fallen off the bus|GPU is lost|no CUDA-capable device is detected"
        r"|CUDA error: (hardware stack|the launch timed out|all CUDA-capable devices are busy"
        r"|system not yet init|system has unsupported|NVLink|device not ready|invalid device ord)"
        r"|NVLink: (fatal|uncorrectable)|NVRM: .*NVLink.* fatal error",
    ),
    _rule(
        "machine_check",
        "device",
        ("[Hardware Error]", "AER: ", "mce: "),
        r"Machine check events logged|mce: \[Hardware Error\]|AER: .*Uncorrect\w+ \((Fatal|Non-F)"
        r"|\[Hardware Error\]: .*(fatal|Fatal|uncorrected|Uncorrected)",
    ),
    _rule(
        "cuda_error",
        "exception",
        ("CUDA error: ", "CUDA failure ", "CUBLAS_STATUS_", "CUDNN_STATUS_"),
        r"CUDA error: (?!success)\w|CUDA failure \d+|(CUBLAS|CUDNN)_STATUS_(?!SUCCESS)[A-Z_]+",
    ),
    # ---- values
    _rule(
        "numerical",
        "numerical",
        ("NumericalError", "FloatingPointError", "nan", "NaN", "non-finite", "inf"),
        r"^(\w+\.)*(NumericalError|FloatingPointError)(:|$)"
        r"|\b(loss|[Gg]radients?|grad[_ ]norm)\b[^,;]{0,40} (is|are|was|became|turned) "
        r"(NaN|nan|inf|not finite|non-finite)\b(?! (checks?|guard))",
    ),
    # ---- network
    _rule(
        "nccl_timeout",
        "network",
        ("ollective operation timeout", "NCCL operations have failed or timed out"),
        r"Watchdog caught collective operation timeout|Some NCCL operations have failed",
    ),
    _rule(
        "rdma",
        "network",
        ("IBV_WC_", "Got completion from peer", "ibv_", "RETRY_EXC", "mlx5_"),
        r"(status|error)\W+\d*\W*\(?IBV_WC_(?!SUCCESS)"
        r"|Got completion from peer .*(error|status[= ]1?[1-9])"
        r"|Call to ibv_\w+ failed|IBV_EVENT_(PORT_ERR|DEVICE_FATAL|QP_FATAL)|RETRY_EXC_ERR"
        r"|mlx5_\w+.*(health compromised|command failed|Error cqe|device's health)",
    ),
    _rule(
        "nccl",
        "network",
        ("NCCL", "nccl"),
        r"NCCL WARN .*(failed|[Ee]rror|closed|refused|timed out|unreachable|abort)"
        r"|nccl(System|Remote|Internal|UnhandledCuda|Invalid\w+)Error\b|NCCL error( in)?:"
        r"|\[Rank \d+\].*NCCL watchdog thread terminated with exception",
    ),
    _rule(
        "gloo",
        "network",
        ("gloo/transport", "Gloo ", "gloo::"),
        r"gloo/transport\S*\] .*(Timed out|[Cc]onnection|Read error|Write error|failed)"
        r"|Gloo (connectFullMesh failed|\w+ timed out)|gloo::(Io|Timeout|EnforceNotMet)\w*",
    ),
    _rule(
        "store",
        "network",
        ("DistStoreError", "DistNetworkError", "TCPStore", "wait timeout after", "socket"),
        r"^(\w+\.)*Dist(Store|Network)Error(:|$)|wait timeout after \d+ms, keys: "
        r"|(client|server) socket has (timed out|failed)|TCPStore.*(recvValue failed|timed out)",
    ),
    _rule(
        "link",
        "network",
        ("NIC Link is Down", "Link is Down", "link down", "NETDEV WATCHDOG", "link is not ready"),
        r"(mlx5_core|mlx4_en|ixgbe|ice|bnxt_en|i40e|e1000e|igb)\b.*[Ll]ink (is )?[Dd]own"
        r"|NETDEV WATCHDOG: .*transmit queue \d+ timed out",
    ),
    _rule(
        "connection",
        "network",
        ("Connection re", "Connection closed", "Broken pipe", "No route to", "unreachable"),
        r"\[Errno (104|111|32|113|101|110)\]|^(\w+\.)*Connection\w*Error(:|$)"
        r"|(recv|send|read|write|connect|poll)\w*\W.{0,60}: "
        r"(Connection (reset|refused|closed)|Broken pipe|No route to host|Network is unreachable)"
        r"|Connection closed by peer \[",
    ),
    # ---- start
    _rule(
        "address_in_use",
        "launch",
        ("ddress already in use", "EADDRINUSE"),
        r"\[Errno 98\]|EADDRINUSE|(error|failed|bind).*ddress already in use",
    ),
    _rule(
        "library_missing",
        "launch",
        ("ModuleNotFoundError: ", "ImportError: ", "cannot open shared object", "driver version"),
        r"^(ModuleNotFound|Import)Error: |error while loading shared lib"
        r"|CUDA driver version is insufficient",
    ),
    _rule("launch", "launch", ("LaunchError: ", "ConfigError: "), r"^(Launch|Config)Error: "),
    # ---- the process itself
    _rule(
        "worker_killed",
        "out_of_memory",
        ("killed by signal: Killed", "is killed by signal"),
        r"DataLoader worker \(pid[^)]*\) is killed by signal: Killed",
    ),
    _rule(
        "crash",
        "signal",
        ("Fatal Python error: ", "Segmentation fault", "terminate called", "SIGSEGV", "segfault"),
        r"^Fatal Python error: |^Segmentation fault|^terminate called (after|without)"
        r"|\*\*\* SIG(SEGV|ABRT|BUS|FPE|ILL) |\[\d+\]: segfault at ",
    ),
)

# The last line of a traceback that no rule above knows.
TRACEBACK = "Traceback (most recent call last)"
EXCEPTION = Rule("python_exception", "exception", (TRACEBACK,), re.compile(r"^[A-Za-z_][\w.]*"))
BY_NAME = {rule.name: rule for rule in (*RULES, EXCEPTION)}
WORDS = tuple(sorted({word for rule in RULES for word in rule.words}))
_PREFIX = re.compile(r"^\s*(\[(?:rank)?\d+\]:? ?)+")


def classify(line: str) -> Rule | None:
    """The rule that speaks for a line; None for one that means nothing."""
    line = _PREFIX.sub("", line[:MOST_LINE]).rstrip()
    return next((rule for rule in RULES if rule.matches(line)), None)


def is_inside_traceback(line: str) -> bool:
    """Whether a traceback goes on after this line, which follows its first."""
    line = _PREFIX.sub("", line)
    return not line.strip() or line[0] in " \t|+~^"
