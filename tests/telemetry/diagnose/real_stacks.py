"""Dumps as py-spy wrote them of ranks of this package that hung (torch 2.13, CPU): the innermost
frames, the rest cut; by what the rank stood in."""

from __future__ import annotations

import random

_TOPS = {
    "all_gather": """    Pending.wait (megascale/flux/collectives.py:40)
    all_gather_gemm (megascale/flux/all_gather_gemm/nccl.py:39)
    _lazy.<locals>.form (megascale/flux/forms.py:164)
    Bound.run (megascale/flux/call.py:111)""",
    "reduce_scatter": """    Pending.wait (megascale/flux/collectives.py:40)
    GemmReduceScatter.run (megascale/flux/gemm_reduce_scatter/operator.py:80)
    GemmReduceScatter.__call__ (megascale/flux/gemm_reduce_scatter/operator.py:60)""",
    "replicated": """    all_reduce (torch/distributed/distributed_c10d.py:3252)
    ShardedDataParallel._sum_replicated (megascale/parallel/zero.py:211)
    ShardedDataParallel.finish_gradients (megascale/parallel/zero.py:162)""",
    "data": """    Pending.wait (megascale/flux/collectives.py:40)
    FullGradients.finish (megascale/parallel/gradients.py:147)
    ShardedDataParallel.finish_gradients (megascale/parallel/zero.py:158)""",
    "gathered": """    Pending.wait (megascale/flux/collectives.py:40)
    ParameterGathers.wait (megascale/parallel/gathering.py:46)
    ShardedDataParallel._before_module (megascale/parallel/zero.py:136)""",
    "world": """    _start_world_sums.<locals>.finish (megascale/train/step.py:132)
    train_step (megascale/train/step.py:82)""",
    "norms": """    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    summer.<locals>.sum_over_group (megascale/parallel/groups.py:96)
    ParameterNorms.over_shards (megascale/optim/norms.py:73)""",
    "channel": """    _wait (megascale/parallel/transfers.py:182)
    Receive.wait (megascale/parallel/transfers.py:126)
    PipelineRuntime._received (megascale/parallel/pipeline.py:258)
    PipelineRuntime._forward (megascale/parallel/pipeline.py:173)""",
    "gradient": """    _wait (megascale/parallel/transfers.py:182)
    Receive.wait (megascale/parallel/transfers.py:126)
    PipelineRuntime._received (megascale/parallel/pipeline.py:258)
    PipelineRuntime._output_gradient (megascale/parallel/pipeline.py:246)
    PipelineRuntime._backward (megascale/parallel/pipeline.py:190)""",
    "done": """    Condition.wait (threading.py:331)
    Loop._train (megascale/train/loop.py:116)""",
    "asleep": """    forward (fault.py:21)
    Module._call_impl (torch/nn/modules/module.py:1789)
    Module._wrapped_call_impl (torch/nn/modules/module.py:1778)
    SerialBlock.forward (megascale/model/block.py:114)""",
    "gil": """    hold (fault.py:20)
    Module._call_impl (torch/nn/modules/module.py:1789)
    TransformerChunk.forward (megascale/model/transformer.py:108)""",
    "stop": """    Mlp.forward (megascale/model/block.py:72)
    Module._call_impl (torch/nn/modules/module.py:1789)
    Module._wrapped_call_impl (torch/nn/modules/module.py:1778)""",
}
_FRAME = """    Loop._launch (megascale/train/loop.py:157)
    Loop._train (megascale/train/loop.py:116)
    <module> (megascale/__main__.py:9)"""
_OTHERS = """Thread 13757 (idle): "lines of rank"
    Condition.wait (threading.py:331)
    LineWriter._run (megascale/telemetry/writer.py:101)
    Thread._bootstrap (threading.py:1002)"""
_OF_KIND = {"two asleep": "asleep", "frozen": "stop", "stop": "stop", "gil": "gil"}


def dump(kind: str, where: str, seed: int) -> str:
    """A dump of a rank that waits at collective or channel `where`, or is faulty by `kind`."""
    top = _OF_KIND.get(kind, kind)
    if kind == "waits":
        top = where
        if "->" in where:
            top = "gradient" if where.endswith("gradient") else "channel"
    frames = _TOPS.get(top, _TOPS["asleep" if kind != "waits" else "done"])
    pid = random.Random(seed).randrange(1000, 99999)
    return (
        f"Process {pid}: python -m megascale train\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        f'Thread {pid} (idle): "MainThread"\n{frames}\n{_FRAME}\n{_OTHERS}\n'
    )
