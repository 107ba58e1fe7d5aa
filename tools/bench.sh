#!/usr/bin/env bash
# Measure what this machine allows: without a GPU the first run of a newcomer, with GPUs every case of
# the bench `step` that has enough of them, and the fused operators.
#
# Targets of `step`: within 10 % of Megatron-Core 0.19.2 on the same machine, same shapes, batch and layout (no
# recomputation, distributed optimizer, fp32 gradients), which is the baseline of each row.
# COMMIT names the commit in a copy of the tree that has no repository. LADDER=1 climbs MegaScale's ladder too,
# which is a run for each rung.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")

if [ "$gpus" -eq 0 ]; then
    "$python" -m benchmarks.first_run
fi

step() { # GPUs, model, target, Megatron-Core's MFU, recipe, further settings
    local ranks=$1 model=$2 target=$3 megatron=$4 recipe=$5 settings=()
    shift 5
    if [ "$gpus" -lt "$ranks" ]; then
        echo "skipped: $model $* needs $ranks GPUs, found $gpus"
        return
    fi
    for setting in "$@"; do settings+=(--set "$setting"); done
    "$python" -m megascale bench step "$recipe" --nproc "$ranks" --model "$model" "${settings[@]}" \
        --target "$target" --baseline "megatron_core=$megatron" ${COMMIT:+--commit "$COMMIT"}
}

wide=recipes/bench-175b-4l.toml
step 2 7b 0.49 0.544 recipes/bench-7b.toml
step 2 gpt3-175b-4l 0.432 0.480 $wide
step 2 gpt3-175b-4l 0.517 0.574 $wide \
    training.micro_batch_size=4 training.global_batch_size=64
step 2 gpt3-175b-4l 0.413 0.459 $wide \
    parallelism.tensor_parallel_size=1 parallelism.pipeline_parallel_size=2 \
    parallelism.virtual_pipeline_size=2

if [ "$gpus" -ge 2 ]; then
    "$python" -m megascale bench flux ${COMMIT:+--commit "$COMMIT"}
fi

ladder() { # GPUs, recipe, further settings
    local ranks=$1 recipe=$2 settings=()
    shift 2
    if [ "$gpus" -lt "$ranks" ]; then
        echo "skipped: the ladder on $recipe $* needs $ranks GPUs, found $gpus"
        return
    fi
    for setting in "$@"; do settings+=(--set "$setting"); done
    "$python" -m megascale bench step "$recipe" --nproc "$ranks" --ablate --rounds 2 --model gpt3-175b-4l \
        "${settings[@]}" ${COMMIT:+--commit "$COMMIT"}
}

if [ -n "${LADDER:-}" ]; then
    ladder 2 $wide
    ladder 2 $wide parallelism.tensor_parallel_size=1 parallelism.pipeline_parallel_size=2 \
        parallelism.virtual_pipeline_size=2
    ladder 4 $wide parallelism.pipeline_parallel_size=2 parallelism.virtual_pipeline_size=2
fi
