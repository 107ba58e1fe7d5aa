"""A driver in a process of its own, to be killed: machines on paper, agents come by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

from megascale.cluster.driver.program import Program
from megascale.cluster.driver.session import Job, run
from tests.cluster.driver.fakes import PaperBackend
from tests.cluster.driver.test_runtime import quick

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    policy = quick(suspect_after_s=5.0, flap_tolerance_s=10.0)
    backend = PaperBackend(2, adopt_s=float(sys.argv[2]))
    sys.exit(run(Job(Program(run_dir, ("train",)), policy), backend))
