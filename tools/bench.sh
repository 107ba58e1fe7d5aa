#!/usr/bin/env bash
# Measure what this machine allows: without a GPU the first run of a newcomer, with GPUs every case of
# the bench `step` that has enough of them, and the fused operators.
#
# Targets of `step`: within 10 % of Megatron-Core 0.19.2 on the same machine, same shapes, batch and layout (no
# recomputation, distributed optimizer, fp32 gradients), which is the baseline of each row.
# COMMIT names the commit in a copy of the tree that has no repository. LADDER=1 climbs MegaScale's ladder too,
# which is a run for each rung, and WATERFALL=1 measures where the time of these steps goes.
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
        --roof --target "$target" --baseline "megatron_core=$megatron" ${COMMIT:+--commit "$COMMIT"}
}

wide=recipes/bench-175b-4l.toml
step 2 7b 0.49 0.544 recipes/bench-7b.toml
step 2 gpt3-175b-4l 0.432 0.480 $wide
step 2 gpt3-175b-4l 0.517 0.574 $wide \
    training.micro_batch_size=4 training.global_batch_size=64 parallelism.join_weight_gradients=1
step 2 gpt3-175b-4l 0.413 0.459 $wide \
    parallelism.tensor_parallel_size=1 parallelism.pipeline_parallel_size=2 \
    parallelism.virtual_pipeline_size=2 parallelism.pipeline_schedule=interleaved_zb \
    parallelism.share_head=true parallelism.join_weight_gradients=1

if [ "$gpus" -ge 2 ]; then
    "$python" -m megascale bench flux ${COMMIT:+--commit "$COMMIT"}
fi

kind() { # flags, GPUs, model, recipe, further settings
    local flags=$1 ranks=$2 model=$3 recipe=$4 settings=()
    shift 4
    if [ "$gpus" -lt "$ranks" ]; then
        echo "skipped: $flags on $recipe $* needs $ranks GPUs, found $gpus"
        return
    fi
    for setting in "$@"; do settings+=(--set "$setting"); done
    # shellcheck disable=SC2086 # flags are words
    "$python" -m megascale bench step "$recipe" --nproc "$ranks" $flags --model "$model" \
        "${settings[@]}" ${COMMIT:+--commit "$COMMIT"}
}

pipeline=(parallelism.tensor_parallel_size=1 parallelism.pipeline_parallel_size=2
    parallelism.virtual_pipeline_size=2 parallelism.join_weight_gradients=1)

if [ -n "${LADDER:-}" ]; then
    papers=parallelism.join_weight_gradients=1 # the paper joins none
    kind "--ablate --rounds 2" 2 gpt3-175b-4l $wide $papers
    kind "--ablate --rounds 2" 2 gpt3-175b-4l $wide "${pipeline[@]}"
    kind "--ablate --rounds 2" 2 7b recipes/bench-7b.toml
    kind "--ablate --rounds 2" 4 gpt3-175b-4l $wide $papers parallelism.pipeline_parallel_size=2 \
        parallelism.virtual_pipeline_size=2
fi

if [ -n "${WATERFALL:-}" ]; then
    for case in "$wide" "$wide ${pipeline[*]}" recipes/bench-7b.toml; do
        model=gpt3-175b-4l
        [ "$case" = recipes/bench-7b.toml ] && model=7b
        # shellcheck disable=SC2086 # a recipe and settings
        kind "--waterfall --without-communication" 2 $model $case
    done
    kind --bubble 2 gpt3-175b-4l $wide "${pipeline[@]}"
fi
