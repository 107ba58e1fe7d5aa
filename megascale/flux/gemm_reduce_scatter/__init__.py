"""A GEMM, then the reduce-scatter of its rows: the row-parallel linear (Flux 3.1, MegaScale 3.2).

Contract: every rank holds its columns of x and of the weight; the partial products are summed over
ranks and rank r keeps rows [r t, (r + 1) t):
    y_tO = reduce_scatter(x_Ti @ weight_Oi.T)
"""
