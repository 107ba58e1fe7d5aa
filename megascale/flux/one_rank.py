"""A call of one rank alone: a plain GEMM, refused for the same reasons as among several.

It rounds where the reference form does, so that one rank and several differ in the order of sums
alone: a row-parallel bias comes after the product.
"""

from __future__ import annotations

from typing import Any

from megascale.flux.call import Call, check_sum, check_tensors
from megascale.flux.gemm_reduce_scatter.pair import sum_of_products
from megascale.flux.problem import check
from megascale.flux.ranks import gemm


def check_alone(call: Call) -> None:
    """FluxError for wrong arguments."""
    check_tensors(call)
    problems = [
        check(p.op, p.x, p.weights, p.biases, None, p.layout, p.num_rows, names=p.names)
        for p in ([call] if call.pair is None else [call, call.second])
    ]
    if call.pair is not None:
        check_sum(call, *problems)


def run_alone(call: Call) -> Any:
    """What the operator of the call gives, as a form does."""
    layout: Any = call.layout  # checked
    if call.op == "ag_gemm":
        terms = zip(call.weights, call.biases, strict=True)
        outputs = [gemm(call.x, weight, bias, layout=layout) for weight, bias in terms]
        return outputs, call.x if call.gathered else None
    if call.pair is None:
        y = gemm(call.x, call.weights[0], layout=layout)
    else:
        y = sum_of_products(call.x, call.weights[0], layout, call.pair)
    return y if call.biases[0] is None else y.add_(call.biases[0])
