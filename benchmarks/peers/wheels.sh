#!/usr/bin/env bash
# Fetch the peers into .peers/ for a GPU machine without network (Linux, Python 3.12, torch already
# there): Megatron-Core, TorchTitan and those of TorchTitan's imports that are rarely installed.
# 4 MB in all. benchmarks/peers/README.md says how to install them beside the system's packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

# All platforms: a compiled wheel is named after the oldest one that it supports.
"$python" -m pip download --quiet --disable-pip-version-check --dest .peers \
    --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 \
    megatron-core==0.19.2 \
    torchtitan==0.2.2 \
    tyro==1.0.16 \
    docstring-parser==0.18.0 \
    typeguard==4.6.1 \
    torchdata==0.11.0 \
    datasets==5.2.0 \
    dill==0.4.1 \
    multiprocess==0.70.19
ls -lh .peers
