"""What the project's own GPU kernels are built from: the Hopper GEMM engine, and their launch.

Nothing here knows an operator or a group; `ops` (one device) and `flux` (several) build on it.
"""
