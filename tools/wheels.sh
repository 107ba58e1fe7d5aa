#!/usr/bin/env bash
# Fetch into wheels/ what an offline GPU machine (Linux, Python 3.12, torch already there) lacks of
# what `megascale train` and `megascale run` import, at the versions of the constraints.
# docs/gpu-machine.md says how to use it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

packages=(
    pydantic pydantic-core annotated-types typing-inspection typing-extensions xxhash  # train
    fastapi starlette uvicorn httptools anyio annotated-doc opentelemetry-api   # run: the driver
    py-spy                                                                      # run: stacks
)
pins=()
for package in "${packages[@]}"; do
    pins+=("$(grep "^$package==" constraints-cpu.txt)")
done

# All these platforms: a compiled wheel is named after the oldest one that it supports.
"$python" -m pip download --quiet --disable-pip-version-check --dest wheels \
    --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 \
    "${pins[@]}"
ls -lh wheels
