"""What there is to run on: devices, nodes, network, as files; and the price of an operation.

cluster.py  load.py      a cluster, and its TOML file: by name from `catalogue/`, or by path
sourced.py               every number of a file says where it comes from
device.py                gemm.py, attention.py, passes.py: parametric curves of a device
links.py  fabric.py      NVLink, NICs, rings and trees; the network's shape
groups.py                how the members of a communication group lie on nodes
samples.py               what `megascale calibrate` measures
sampled.py  transfers.py prices through samples, by surface.py
write.py                 a file from samples: template.py, fitting.py, minimise.py, toml.py
"""
