"""Which form runs where nothing was tuned: a table by operator, mode and rows.

Pure, so that every rank answers the same without asking. A missing entry of the tuning cache means
this rule and never an error. By the geometric mean over the shapes of `bench flux` on 2x H200 it is
within 2.5 % of the best form for each number of rows.
"""

from __future__ import annotations

from typing import Literal

from megascale.flux.problem import Op, Problem

Mode = Literal["eager", "graph"]

UNBOUNDED = 1 << 62

# (rows of all ranks up to and including, form)
RULE: dict[tuple[Op, Mode], tuple[tuple[int, str], ...]] = {
    ("ag_gemm", "eager"): ((128, "few_rows"), (512, "plain"), (UNBOUNDED, "fused")),
    ("ag_gemm", "graph"): ((512, "plain"), (UNBOUNDED, "fused")),
    ("gemm_rs", "eager"): ((128, "few_rows"), (UNBOUNDED, "fused")),
    ("gemm_rs", "graph"): ((64, "few_rows"), (128, "plain"), (UNBOUNDED, "fused")),
    ("gemm_ar", "eager"): ((128, "few_rows"), (512, "plain"), (UNBOUNDED, "fused")),
    ("gemm_ar", "graph"): ((64, "few_rows"), (512, "plain"), (UNBOUNDED, "fused")),
}

# What is taken, in this order, where the form of the table is not among the candidates.
OTHERWISE = ("chunked", "plain", "nccl")


def default_form(problem: Problem, mode: Mode = "eager") -> str:
    """The name of the form for this problem; a table row, no measurement."""
    rows = RULE[problem.op, mode]
    return next(form for most_rows, form in rows if problem.m <= most_rows)
