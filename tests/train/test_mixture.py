"""A mixture in a run: what is refused before it starts, what a checkpoint remembers of it, and that
it resumes at any sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megascale.config import RunConfig, load_config
from megascale.data import open_prepared
from megascale.data.prepare import prepare
from megascale.data.prepared import Meta
from megascale.errors import CheckpointError, ConfigError, DataError
from megascale.train.agreement import check_agreement
from megascale.train.corpus import data_identity, resolve_vocabulary, unigram_entropy_nats
from megascale.train.state import Progress, check_same_samples, checkpoint_meta
from tests.distributed import run_ranks
from tests.shared import shared_folder
from tests.train.harness import TINY

TEXTS = {
    "prose": "some words, some more words, and words that nobody wrote before\n",
    "code": "def f(x): return x + 1\n\nfor i in range(10): print(f(i))\n",
    "other": "some words, some more words, and words that nobody wrote before\n",
}


def _write(folder: Path, kind: str, tokenizer: str) -> None:
    source = folder / "texts" / kind
    source.mkdir(parents=True)
    for n in range(24):
        (source / f"{n}.txt").write_text(f"{n} " + TEXTS[kind] * (3 + n % 5))
    prepare([str(source)], tokenizer, folder / kind, workers=1, validation_fraction=0.2)


def write_parts(folder: Path) -> None:
    """Two data sets of one tokenizer, and one of another."""
    _write(folder, "prose", "train:BPE:280")
    _write(folder, "code", str(folder / "prose"))
    _write(folder, "other", "train:BPE:300")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "mixture-parts", write_parts)


def mixture_of(*parts: tuple[Path, float], more: tuple[str, ...] = ()) -> RunConfig:
    return load_config(None, [setting(*parts), "training.seq_len=16", *more])


def setting(*parts: tuple[Path, float]) -> str:
    tables = ", ".join(f'{{path = "{path}", weight = {weight}}}' for path, weight in parts)
    return f"data.mixture=[{tables}]"


def test_the_vocabulary_is_the_parts(parts: Path) -> None:
    config = mixture_of((parts / "prose", 0.7), (parts / "code", 0.3))
    assert resolve_vocabulary(config).model.vocab_size == Meta.read(parts / "prose").vocab_size


def _no_tokens(folder: Path) -> None:
    for name in ("train.bin", "train.idx"):
        (folder / name).write_bytes(b"")


def _other_vocabulary(folder: Path) -> None:
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text.replace('"vocab_size": 280', '"vocab_size": 279'))


def _nothing_held_out(folder: Path) -> None:
    for file in folder.glob("valid.*"):
        file.unlink()
    meta = Meta.read(folder)
    meta.splits.pop("valid")
    meta.write(folder)


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        (shutil.rmtree, (), "no prepared data in .*/code"),
        (_no_tokens, (), r"code/train\.idx is cut short"),
        (_other_vocabulary, (), r"has vocab_size 280, that of .*/code 279, with the same token"),
        (
            lambda _: None,
            ("training.seq_len=5000",),
            r"code/train has \d+ tokens in .* less than one sample of seq_len 5000",
        ),
        (lambda _: None, ("model.vocab_size=100",), "model.vocab_size is 100, the tokenizer of"),
        (_nothing_held_out, ("validation.interval=2",), "/code has no valid split; prepare"),
    ],
    ids=["missing", "empty", "other vocabulary", "short", "model too small", "no valid split"],
)
def test_a_part_that_does_not_fit_is_named(
    parts: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    more: tuple[str, ...],
    message: str,
) -> None:
    long = tmp_path / "long"
    if "5000" in "".join(more):  # the first part is long enough
        source = tmp_path / "text.txt"
        source.write_text(TEXTS["prose"] * 2000)
        prepare([str(source)], str(parts / "prose"), long, workers=1, validation_fraction=0.0)
    else:
        shutil.copytree(parts / "prose", long)
    code = Path(shutil.copytree(parts / "code", tmp_path / "code"))
    spoil(code)
    with pytest.raises(DataError, match=message):
        resolve_vocabulary(mixture_of((long, 1.0), (code, 1.0), more=more))


def test_parts_of_other_tokens_are_refused(parts: Path) -> None:
    config = mixture_of((parts / "prose", 0.7), (parts / "other", 0.3))
    prose, other = (
        open_prepared(parts / name).meta.tokenizer_sha256 for name in ("prose", "other")
    )
    with pytest.raises(DataError, match=r"parts of data\.mixture have different tok") as error:
        resolve_vocabulary(config)
    for word in (prose[:16], other[:16], f"--tokenizer {parts / 'prose'}"):
        assert word in str(error.value)


def test_the_bar_is_the_parts_entropies_by_their_shares(parts: Path) -> None:
    prose, code = (Meta.read(parts / name).unigram_entropy_nats for name in ("prose", "code"))
    config = mixture_of((parts / "prose", 3), (parts / "code", 1))
    assert unigram_entropy_nats(config) == pytest.approx(0.75 * prose + 0.25 * code, rel=1e-12)


def test_identity_is_of_shares_and_contents_not_of_places(parts: Path, tmp_path: Path) -> None:
    prose, code = parts / "prose", parts / "code"
    identity = data_identity(mixture_of((prose, 0.7), (code, 0.3)))
    moved = Path(shutil.copytree(code, tmp_path / "elsewhere"))
    assert data_identity(mixture_of((prose, 0.7), (moved, 0.3))) == identity
    assert data_identity(mixture_of((prose, 7), (moved, 3))) == identity
    for other in (((prose, 0.6), (code, 0.4)), ((code, 0.3), (prose, 0.7)), ((prose, 1),)):
        assert data_identity(mixture_of(*other)) != identity
    single = load_config(None, [f"data.path={prose}", "training.seq_len=16"])
    assert data_identity(single)["documents"] != identity["documents"]
    assert "mixture" not in data_identity(single)


def test_a_checkpoint_is_resumed_with_its_mixture_alone(parts: Path) -> None:
    prose, code = parts / "prose", parts / "code"
    config = mixture_of((prose, 0.7), (code, 0.3))
    single = load_config(None, [f"data.path={prose}", "training.seq_len=16"])
    meta = checkpoint_meta(config, Progress(), 0, data_identity(config))
    check_same_samples(meta, config, data_identity(config), "it")
    others = {
        r"data of mixture '7/10 of \w{16} \+ 3/10 of \w{16}', this run has '3/5 of": mixture_of(
            (prose, 0.6), (code, 0.4)
        ),
        "data of documents": single,
    }
    for message, other in others.items():
        with pytest.raises(CheckpointError, match=message):
            check_same_samples(meta, other, data_identity(other), "it")
    meta = checkpoint_meta(single, Progress(), 0, data_identity(single))
    with pytest.raises(CheckpointError, match="data of documents"):
        check_same_samples(meta, config, data_identity(config), "it")


def _agree(rank: int, world_size: int, of_rank: list[list[str]]) -> str:
    try:
        check_agreement(load_config(None, [*TINY, *of_rank[rank]]))
    except ConfigError as error:
        return str(error)
    return "agreed"


def test_ranks_may_have_a_mixture_elsewhere_but_no_other(parts: Path, tmp_path: Path) -> None:
    prose, code = parts / "prose", parts / "code"
    moved = Path(shutil.copytree(code, tmp_path / "elsewhere"))
    real = "data.synthetic=false"
    ours = [real, setting((prose, 0.7), (code, 0.3))]
    elsewhere = [real, setting((prose, 0.7), (moved, 0.3))]
    assert run_ranks(_agree, 2, [ours, elsewhere]) == ["agreed"] * 2
    other = [real, setting((prose, 0.6), (code, 0.4))]
    for said in run_ranks(_agree, 2, [ours, other]):
        assert "rank 1 was given another run than rank 0: data.mixture is '3/5 of " in said


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf"])
def test_a_weight_that_is_no_share_is_refused(weight: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture\.0\.weight: got .*, legal: a finite num"):
        load_config(None, [f'data.mixture=[{{path="a", weight={weight}}}]'])
    with pytest.raises(ConfigError, match=r"data\.mixture\.1\.weight: got true, legal: a number"):
        load_config(None, ['data.mixture=[{path="a", weight=1}, {path="b", weight=true}]'])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.packing=pad"], "document_mask is true with data.packing 'pad', where a sample is"),
        (["data.synthetic=true", "data.mixture=[]"], "is true with data.synthetic: random tokens"),
    ],
)
def test_a_document_mask_without_documents_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ['data.path="a"', "data.document_mask=true", *settings])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.path=c"], "data.path 'c' is set too; a run reads one or the other: add the folder"),
        (["data.synthetic=true"], "data.synthetic = true is set too"),
        (['data.mixture=[{path="a", weight=1}, {path="x/../a/", weight=2}]'], "names 'x/../a/' tw"),
        (['data.mixture=[{path="a"}]'], r"data\.mixture\.0\.weight: Field required"),
        (['data.mixture=[{path="", weight=1}]'], r"data\.mixture\.0\.path: .*at least 1 char"),
        (['data.mixture=[{path="a", share=1}]'], "unknown key 'share'; legal keys: path, weight"),
    ],
)
def test_mixtures_that_mean_nothing_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ['data.mixture=[{path="a", weight=1}]', *settings])
