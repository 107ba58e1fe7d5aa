"""A GEMM whose partial products are summed over ranks, on every rank: the row-parallel linear of
inference, where no rank wants only its rows (MegaScale 3.2 without sequence parallelism).

Contract: every rank holds its columns of x and of the weight; the result is the same on all ranks:
    y_TO = all_reduce(x_Ti @ weight_Oi.T) + bias_O
"""
