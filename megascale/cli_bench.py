"""`megascale bench`: what is measured on this machine, each verb a few lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megascale.cli_cluster import Overrides

bench_app = typer.Typer(help="Measure on this machine's devices.", no_args_is_help=True)


@bench_app.command("flux")
def bench_flux(
    ops: Annotated[
        str, typer.Option(help="of ag_gemm,gemm_rs,gemm_ar")
    ] = "ag_gemm,gemm_rs,gemm_ar",
    shapes: Annotated[
        str, typer.Option(help="gpt3, llama70b, names of shapes, or a file NAME.toml")
    ] = "gpt3,llama70b",
    rows: Annotated[
        str, typer.Option(help="rows of all ranks together")
    ] = "1,16,64,128,512,1024,2048,4096,8192,16384",
    nproc: Annotated[int | None, typer.Option(min=1, help="ranks; default: a GPU each")] = None,
    mode: Annotated[str, typer.Option(help="eager, graph or both")] = "both",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on GPUs, float32 on a CPU")] = None,
    forms: Annotated[str, typer.Option(help="only these of ours, beside all others")] = "",
    configs: Annotated[int, typer.Option(min=1, help="of a form, the first so many")] = 1_000,
    tune: Annotated[str, typer.Option(help="now: measure choices; cache: look them up")] = "now",
    cache: Annotated[Path | None, typer.Option(help="file of the tuner's choices")] = None,
    output: Annotated[Path, typer.Option(help="rows are appended; summary beside it")] = Path(
        "benchmarks/results/flux.jsonl"
    ),
    commit: Annotated[str | None, typer.Option(help="of a clean copy without repository")] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="no case begins after it")] = 600.0,
) -> None:
    """Fused operators against cuBLAS, NCCL and torch's operators, in one interleaved run."""
    from megascale.flux.bench.start import bench_flux as run

    code = run(
        ops=ops,
        shapes=shapes,
        rows=rows,
        nproc=nproc,
        mode=mode,
        dtype=dtype,
        forms=forms,
        num_configs=configs,
        tune=tune,
        cache=cache,
        output=output,
        commit=commit,
        budget_s=budget_s,
        arguments=sys.argv[1:],
    )
    raise typer.Exit(code)


@bench_app.command("step")
def bench_step(
    recipe: Annotated[Path, typer.Argument(help="TOML recipe")],
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="ranks to start on this machine")] = 1,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="climb MegaScale's ladder: one run a switch")
    ] = False,
    waterfall: Annotated[
        bool, typer.Option("--waterfall", help="where every millisecond of the step goes")
    ] = False,
    without_communication: Annotated[
        bool,
        typer.Option(
            "--without-communication",
            help="check the waterfall against the same step with its collectives left out",
        ),
    ] = False,
    bubble: Annotated[
        bool, typer.Option("--bubble", help="the pipeline's idle share at 1x and 4x the batch")
    ] = False,
    roof: Annotated[
        bool,
        typer.Option("--roof", help="matrix products and attention alone, before and after"),
    ] = False,
    rounds: Annotated[int, typer.Option(help="runs of each case, in turns; the median")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(help="rows are appended; default: benchmarks/results/KIND.jsonl"),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="of a clean copy without repository")] = None,
    model: Annotated[
        str | None, typer.Option(help="name in the rows; default: the preset, or the recipe")
    ] = None,
    target: Annotated[float | None, typer.Option(help="least MFU, a fraction")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="NAME=MFU of another system; may be repeated")
    ] = None,
) -> None:
    """MFU of the training step of a recipe, or of each rung of MegaScale's ablation."""
    from megascale.train.bench.start import bench_step as run

    code = run(
        recipe,
        overrides or [],
        nproc=nproc,
        ablate=ablate,
        waterfall=waterfall,
        without_communication=without_communication,
        bubble=bubble,
        roof=roof,
        rounds=rounds,
        output=output,
        commit=commit,
        model=model,
        target=target,
        baselines=baseline or [],
        arguments=sys.argv[1:],
    )
    raise typer.Exit(code)


@bench_app.command("init")
def bench_init(
    ranks: Annotated[
        str, typer.Option(help="simulated ranks, multiples of 64; 0: none")
    ] = "64,256,1024,2048,12288",
    gloo: Annotated[str, typer.Option(help="real processes; 0: none")] = "8,16,32,64",
    stores: Annotated[str, typer.Option(help="of tcp,tcp-libuv,redis")] = "tcp,tcp-libuv,redis",
    forms: Annotated[
        str,
        typer.Option(help="poll, wait: every group, with that barrier; own: ordered creation"),
    ] = "poll,wait,own",
    budget_s: Annotated[
        float, typer.Option(min=1.0, help="of a rung; what takes longer is scaled, and marked")
    ] = 30.0,
    processes: Annotated[int, typer.Option(min=1, help="that play the simulated ranks")] = 1,
    output: Annotated[Path, typer.Option(help="rows are appended")] = Path(
        "benchmarks/results/init.jsonl"
    ),
    commit: Annotated[str | None, typer.Option(help="of a clean copy without repository")] = None,
) -> None:
    """Creating process groups on TCPStore and Redis, in every order: MegaScale's 3.5."""
    from megascale.train.bench_init.start import bench_init as run

    code = run(
        ranks=ranks,
        gloo=gloo,
        stores=stores,
        forms=forms,
        budget_s=budget_s,
        processes=processes,
        output=output,
        commit=commit,
        arguments=sys.argv[1:],
    )
    raise typer.Exit(code)


@bench_app.command("rank", hidden=True)
def bench_rank(
    recipe: Annotated[Path, typer.Argument(help="TOML recipe")],
    overrides: Overrides = None,
    roof: Annotated[bool, typer.Option("--roof")] = False,
    alone: Annotated[bool, typer.Option("--alone")] = False,
    silent: Annotated[bool, typer.Option("--silent")] = False,
    warm_up_s: Annotated[float, typer.Option()] = 3.0,
    round_s: Annotated[float, typer.Option()] = 0.5,
) -> None:
    """One rank of `bench step`, which starts it."""
    from megascale.train.bench.beside import Beside
    from megascale.train.bench.rank import bench_rank as run

    beside = Beside(roof, alone, silent, warm_up_s=warm_up_s, round_s=round_s)
    run(recipe, overrides or [], beside)
