"""All-gather of token rows, then a GEMM: the column-parallel linear (Flux 3.2, MegaScale 3.2).

Contract: rank r holds rows [r t, (r + 1) t) of x; every rank holds its own rows of the weight.
    y_TO = all_gather(x_tI) @ weight_OI.T
The gathered input comes back too, for a second weight that reads the same rows.
"""
