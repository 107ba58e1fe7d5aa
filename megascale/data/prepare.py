"""`megascale data prepare`: text in, one folder of token files, tokenizer and meta data out.

Invariant: the output exists complete or not at all (`publish.py`), and depends on the documents,
the tokenizer, the validation fraction and the seed; not on the number of workers. Memory does not
grow with the input: a few portions a worker, and the largest document.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megascale.data.corpus import CorpusWriter, cross_entropy_nats, entropy_nats
from megascale.data.encode import Recipe, SplitRule, encode_tasks
from megascale.data.inputs.documents import Kind, Stream
from megascale.data.prepared import FORMAT_VERSION, Meta
from megascale.data.publish import published_whole
from megascale.data.sources import Sources, entry_bytes, entry_tasks, find_sources
from megascale.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_bpe,
    training_vocab_size,
)
from megascale.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

# training reads 5 to 8 MB/s; 4,096 entries learnt from 8 of the standard library's 12 MB need 1.2 %
# more tokens than entries learnt from all of it
_TOKENIZER_SAMPLE_BYTES = 8 << 20


@dataclass(frozen=True)
class Progress:
    """How far a preparation is; given to its `progress` callback after each step.

    total_bytes   0: not known, of a data set that comes over the network
    """

    phase: Literal["tokenizer", "encode"]
    done_bytes: int
    total_bytes: int
    tokens: int


ProgressCallback = Callable[[Progress], None]


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    *,
    workers: int | None = None,
    validation_fraction: float = 0.02,
    seed: int = 0,
    text_column: str = "text",
    strict: bool = False,
    progress: ProgressCallback | None = None,
) -> Meta:
    """Tokenise `inputs` into the folder `output`, which must be new or empty.

    inputs               globs, files, folders, prefixes of .bin and .idx, `hf:NAME:CONFIG:SPLIT`,
                         or `stdlib` (`sources.py` says how a file is read)
    tokenizer            `train:BPE:VOCAB`, a tokenizer.json, or a folder with one
    workers              processes; None: one a core
    validation_fraction  share of documents held out, chosen by the hash of their text; above 0
                         at least one of several documents is
    text_column          the column of tables, the key of lines of JSON, that holds the text
    strict               refuse what otherwise is skipped and counted: documents that are null or
                         not UTF-8, broken row groups and ends of files
    Raises DataError; then nothing is left.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise DataError(f"validation fraction {validation_fraction} is not in [0, 1)")
    if not 0 <= seed < 1 << 64:
        raise DataError(f"seed {seed} is not in [0, 2^64); give one that is, such as 0")
    output = Path(os.path.abspath(output))
    rule = SplitRule(validation_fraction, seed)
    report = progress or (lambda _: None)
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise DataError(f"output {output} exists and is not an empty folder; name a new one")
        sources = find_sources(inputs, text_column)
        workers = workers or _num_cores()
        encoder = _obtain_tokenizer(tokenizer, sources, rule, report)
        with published_whole(output) as partial:
            corpus = _write_corpus(partial, sources, Recipe(encoder, rule, strict), workers, report)
            if (
                validation_fraction > 0
                and "valid" not in corpus.splits
                and corpus.num_documents > 1
            ):
                wider = _hold_one_out(corpus, rule)
                encoder = _obtain_tokenizer(tokenizer, sources, wider, report)
                again = Recipe(encoder, wider, strict)
                corpus = _write_corpus(partial, sources, again, workers, report)
            corpus.require_splits(rule)
            command = _command(inputs, tokenizer, output, rule, text_column, strict)
            meta = _describe(corpus, encoder, rule, sources.num_files, command)
            meta.write(partial)
    except OSError as error:  # an input that cannot be read, a disk that is full
        raise DataError(f"could not prepare {output}: {error}; nothing was left behind") from error
    return meta


def prepare_with_progress(
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    *,
    workers: int | None = None,
    validation_fraction: float = 0.02,
    seed: int = 0,
    text_column: str = "text",
    strict: bool = False,
) -> None:
    """`prepare` with a bar on standard error and a summary on standard output."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    titles = {"tokenizer": "learn the vocabulary", "encode": "tokenise"}
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        bar_of: dict[str, TaskID] = {}

        def show(step: Progress) -> None:
            if step.phase not in bar_of:
                bar_of[step.phase] = bars.add_task(
                    titles[step.phase], total=step.total_bytes or None
                )
            bars.update(bar_of[step.phase], completed=step.done_bytes)

        meta = prepare(
            inputs,
            tokenizer,
            output,
            workers=workers,
            validation_fraction=validation_fraction,
            seed=seed,
            text_column=text_column,
            strict=strict,
            progress=show,
        )
    _print_summary(meta, output)


def _print_summary(meta: Meta, output: Path) -> None:
    for name, split in meta.splits.items():
        print(f"{name}: {split.tokens:,} tokens in {split.documents:,} documents")
    print(f"skipped: {meta.skipped_empty:,} empty, {meta.skipped_undecodable:,} not UTF-8", end="")
    print(f", {meta.skipped_null:,} null")
    if meta.skipped_row_groups or meta.skipped_file_ends:
        print(f"broken: {meta.skipped_row_groups:,} row groups, ", end="")
        print(f"the ends of {meta.skipped_file_ends:,} files")
    if meta.ends_added:
        print(f"ends of documents added to tokens: {meta.ends_added:,}")
    print(f"vocabulary {meta.vocab_size:,}; unigram entropy {meta.unigram_entropy_nats:.3f} nats")
    print(f"written to {output}")


def _obtain_tokenizer(
    spec: str, sources: Sources, rule: SplitRule, report: ProgressCallback
) -> TextTokenizer:
    vocab_size = training_vocab_size(spec)
    if vocab_size is None:
        return load_tokenizer(Path(spec))
    if sources.token_files:
        raise DataError(
            f"tokenizer {spec!r} would be learnt, but {sources.token_files[0]} is tokens already; "
            "give the tokenizer that made them (a tokenizer.json, or a folder with one)"
        )
    return train_bpe(_sample_texts(sources, rule, report), vocab_size)


def _sample_texts(sources: Sources, rule: SplitRule, report: ProgressCallback) -> Iterator[str]:
    """Training documents drawn from all over the corpus; held-out text stays unseen.

    Of each stream the beginning is taken, streams sharing the sample evenly.
    """
    entries = sources.entries
    num_streams = sum(isinstance(entry, Stream) for entry in entries)
    total = _TOKENIZER_SAMPLE_BYTES
    if not num_streams:
        total = min(total, sources.num_bytes)
    done = 0
    for entry in random.Random(rule.seed).sample(entries, len(entries)):
        stop = done + total // num_streams if isinstance(entry, Stream) else total
        with closing(entry_tasks(entry)) as tasks:
            for task in tasks:
                texts = [t for part in task for t in part.read() if t and isinstance(t, str)]
                yield from (text for text in texts if rule.split(text) == "train")
                is_stream = isinstance(entry, Stream)
                done += sum(map(len, texts)) if is_stream else entry_bytes(task)
                report(Progress("tokenizer", min(done, total), total, 0))
                if done >= stop:
                    break
        if done >= total:
            return
    report(Progress("tokenizer", total, total, 0))


def _hold_one_out(corpus: CorpusWriter, rule: SplitRule) -> SplitRule:
    """A rule that holds out the document with the smallest draw, and its copies.

    Then all is done again, the vocabulary too: it must not be learnt from held-out text. It is rare
    but for a few documents.
    """
    logger.warning(
        "none of the %d documents is held out at validation fraction %s; holding out the one with "
        "the smallest hash",
        corpus.num_documents,
        rule.validation_fraction,
    )
    return replace(rule, validation_fraction=math.nextafter(corpus.smallest_draw, 1.0))


def _write_corpus(
    folder: Path, sources: Sources, recipe: Recipe, workers: int, report: ProgressCallback
) -> CorpusWriter:
    """Tokenizer and token files; over those of an earlier call."""
    recipe.tokenizer.save(folder)
    total = sources.num_bytes
    done = 0
    with (
        CorpusWriter(folder, recipe.tokenizer.vocab_size) as corpus,
        closing(sources.tasks()) as tasks,
        closing(encode_tasks(tasks, recipe, workers)) as encoded_tasks,
    ):
        for encoded in encoded_tasks:
            corpus.add(encoded)
            done += encoded.num_bytes
            report(Progress("encode", done, total, corpus.num_tokens))
    return corpus


def _describe(
    corpus: CorpusWriter, tokenizer: TextTokenizer, rule: SplitRule, num_files: int, command: str
) -> Meta:
    train, valid = corpus.counts["train"], corpus.counts["valid"]
    return Meta(
        format_version=FORMAT_VERSION,
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document_id=tokenizer.end_of_document_id,
        splits=corpus.splits,
        unigram_entropy_nats=entropy_nats(train),
        valid_unigram_cross_entropy_nats=cross_entropy_nats(valid, train),
        skipped_undecodable=corpus.skipped[Kind.UNDECODABLE],
        skipped_empty=corpus.skipped[Kind.EMPTY],
        skipped_null=corpus.skipped[Kind.NULL],
        skipped_row_groups=corpus.skipped[Kind.ROW_GROUP],
        skipped_file_ends=corpus.skipped[Kind.FILE_END],
        ends_added=corpus.ends_added,
        source_files=num_files,
        documents_sha256=corpus.documents_sha256,
        seed=rule.seed,
        validation_fraction=rule.validation_fraction,
        command=command,
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _command(
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    rule: SplitRule,
    text_column: str,
    strict: bool,
) -> str:
    return shlex.join(
        [
            *("megascale", "data", "prepare"),
            *(part for name in inputs for part in ("--input", name)),
            *("--tokenizer", tokenizer),
            *("--output", str(output)),
            *("--validation-fraction", str(rule.validation_fraction)),
            *("--seed", str(rule.seed)),
            *(("--text-column", text_column) if text_column != "text" else ()),
            *(("--strict",) if strict else ()),
        ]
    )
