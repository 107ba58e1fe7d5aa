"""The self-check's work that needs torch: `python -m megascale.train.selfcheck NAME JSON ...`.

Started by `megascale.cluster.selfcheck`, which judges what comes back; here nothing is expected of
a device but that its results are right. A module a workload:

    gemm        speed of matrix products on CPU and on every GPU
    mesh        copies between every memory node and every GPU, and between GPUs
    replay      a small training step on fixed input, hashed; any device of a kind gives these bits
    all_to_all  between the devices of a node; one process a device
    neighbours  an all-reduce between two nodes; one process each
"""
