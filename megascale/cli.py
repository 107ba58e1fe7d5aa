"""`megascale`: one program, a few lines a verb. Heavy packages are imported by the verb that runs.

A `MegascaleError` is printed as one message without a traceback and ends with its exit code; any
other exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megascale import __version__
from megascale.cli_bench import bench_app
from megascale.cli_checkpoint import checkpoint_app
from megascale.cli_cluster import Overrides, chaos, run, selfcheck
from megascale.cli_plan import calibrate, plan, simulate
from megascale.cli_telemetry import dashboard, diagnose, monitor, profile, stream, trace
from megascale.errors import MegascaleError

app = typer.Typer(
    name="megascale",
    help="Train large language models with 3D parallelism.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)
convert_app = typer.Typer(help="Exchange weights with Hugging Face.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(convert_app, name="convert")
app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app, name="checkpoint")

for verb in (
    run,
    selfcheck,
    chaos,
    plan,
    simulate,
    calibrate,
    diagnose,
    trace,
    profile,
    dashboard,
    stream,
    monitor,
):
    app.command()(verb)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML recipe, or the folder of a run")],
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="start this many ranks on this machine")
    ] = None,
    resume: Annotated[bool, typer.Option(help="continue the run in job.run_dir")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan for --nproc ranks, start nothing")
    ] = False,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port of the local ranks' meeting place")
    ] = None,
) -> None:
    """Train. Under torchrun's or srun's variables this process is one rank."""
    from megascale.train.start import start_training

    start_training(
        recipe,
        overrides or [],
        nproc=nproc,
        resume=resume,
        dry_run=dry_run,
        master_port=master_port,
    )


@data_app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="glob, file or folder of text, .jsonl, .parquet or .arrow, prefix of .bin and "
            ".idx, hf:NAME:CONFIG:SPLIT, or 'stdlib'; may be repeated",
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="train:BPE:VOCAB, a tokenizer.json, or a Hugging Face folder")
    ],
    output: Annotated[Path, typer.Option(help="new folder for the token files")],
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: cores")] = None,
    validation_fraction: Annotated[float, typer.Option(min=0.0, max=0.5)] = 0.02,
    seed: Annotated[int, typer.Option(help="of the split into train and validation")] = 0,
    text_column: Annotated[str, typer.Option(help="column or key that holds the text")] = "text",
    strict: Annotated[
        bool, typer.Option("--strict", help="refuse what otherwise is skipped and counted")
    ] = False,
) -> None:
    """Tokenise text into memory-mapped token files."""
    from megascale.data.prepare import prepare_with_progress

    prepare_with_progress(
        inputs,
        tokenizer,
        output,
        workers=workers,
        validation_fraction=validation_fraction,
        seed=seed,
        text_column=text_column,
        strict=strict,
    )


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="run folder or checkpoint")],
    prompt: Annotated[str, typer.Option(help="text to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="0: all")] = 50,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    from megascale.serve.generate import generate_text

    typer.echo(
        generate_text(
            run,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
    )


@convert_app.command("to-hf")
def to_hf(
    source: Annotated[Path, typer.Argument(help="run folder or checkpoint")],
    output: Annotated[Path, typer.Argument(help="new folder for safetensors and config.json")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Export a checkpoint for transformers."""
    from megascale.train.convert import export_to_hf

    typer.echo(export_to_hf(source, output, dtype=dtype))


@convert_app.command("from-hf")
def from_hf(
    source: Annotated[Path, typer.Argument(help="Hugging Face model folder")],
    output: Annotated[Path, typer.Argument(help="new run folder with a step-0 checkpoint")],
) -> None:
    """Import a transformers model as a run folder that train and generate can start from."""
    from megascale.train.convert import import_from_hf

    typer.echo(import_from_hf(source, output))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point of the `megascale` command."""
    try:
        app()
    except MegascaleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
