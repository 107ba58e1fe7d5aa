"""Megatron-Core's GPT in the shape of a megascale preset: local layer spec, data-parallel wrapper,
distributed optimizer. Importing this module imports megatron-core.

Megatron's fastest operators come from TransformerEngine and Apex, which are absent. Where its
user may choose, torch's fused operators stand in: attention (cuDNN first), LayerNorm and RMSNorm,
AdamW. `wgrad.py` is the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.options import Options
from megascale.config import ModelConfig

# The order that TorchTitan has too.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass
class Peer:
    """What the training loop needs."""

    config: Any
    chunks: list[Any]
    optimizer: Any


class TorchAttention(MegatronModule):
    """Causal core attention by torch's SDPA. Legend: S tokens, B batch, H heads here, D of a head.

    Dropout, masks and windows are not asked for by the shapes of the bench, and refused.
    """

    chosen: str | None = None  # what torch took in the first call

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, config.attention_dropout
        assert config.window_size is None, config.window_size

    def forward(self, q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(BACKENDS, set_priority=True):
            if TorchAttention.chosen is None:
                code = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
                TorchAttention.chosen = SDPBackend(code).name.lower()
            out_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out_BHSD.permute(2, 0, 1, 3).flatten(2)


def torch_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    """torch's fused norm, its parameters marked so that their gradients are summed over TP."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def build(options: Options, *, fused_wgrad: bool, recompute_layers: int) -> Peer:
    """Chunks and optimizer of this rank; groups exist already.

    recompute_layers  of each rank's chunk, from its first on, whose activations are recomputed
    """
    config = _transformer_config(options, fused_wgrad, recompute_layers)
    overlap = options.dp > 1
    chunks = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
            ),
            _chunk(config, options, vp_stage),
            disable_bucketing=vp_stage > 0,
        )
        for vp_stage in range(options.vp)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    return Peer(config, chunks, _optimizer(chunks, overlap))


def _one_or_all(functions: list[Any]) -> Any:
    """Megatron's schedules take a function for one chunk and a list for several."""
    return functions[0] if len(functions) == 1 else functions


def _chunk(config: Any, options: Options, vp_stage: int) -> nn.Module:
    """The virtual stage of this rank, in bf16 on its device."""
    model = options.model
    stage = vp_stage if options.vp > 1 else None
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = torch_norm
    layer.self_attention.submodules.core_attention = TorchAttention
    num_layers = get_num_layers_to_build(config, vp_stage=stage)
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=torch_norm),
        vocab_size=model.vocab,
        max_sequence_length=options.seq,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
        rotary_base=int(model.rope_theta),
        vp_stage=stage,
    )
    return chunk.to(options.device).bfloat16()


def _transformer_config(options: Options, fused_wgrad: bool, recompute_layers: int) -> Any:
    model = options.model
    _check_shape(model)
    recompute: dict[str, Any] = {}
    if recompute_layers:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": recompute_layers,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.dim_per_head,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.gated,
        activation_func=F.silu if model.gated else F.gelu,
        add_bias_linear=model.bias == "all",
        add_qkv_bias=model.bias == "qkv",
        init_method_std=model.init_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # precision
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # layout
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vp if options.vp > 1 else None,
        sequence_parallel=options.tp > 1,
        overlap_p2p_comm=options.vp > 1,
        batch_p2p_comm=options.vp == 1,
        deallocate_pipeline_outputs=options.pp > 1,
        # operators; what is off needs TransformerEngine or Apex
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=fused_wgrad,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        transformer_impl="local",
        use_cpu_initialization=options.device == "cpu",
        **recompute,
    )


def _check_shape(model: ModelConfig) -> None:
    """The presets of the bench; what else megascale can do is not translated here."""
    plain = (
        model.block == "serial"
        and model.attention_window is None
        and not model.qk_norm
        and model.rope_scaling is None
        and model.activation in ("gelu_tanh", "swiglu")
    )
    assert plain, model


def _optimizer(chunks: list[Any], overlap: bool) -> Any:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            overlap_param_gather=overlap,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    # Without Apex's fused Adam Megatron takes torch's AdamW; torch's own fused form is its equal.
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = False, True
    return optimizer
