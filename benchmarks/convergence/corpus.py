"""Real text for the convergence runs: documentation that Debian packages carry, and Python.

    python -m benchmarks.convergence.corpus FOLDER     # downloads about 58 MB with apt-get

Writes FOLDER/<package>.jsonl, a document a line, as `megascale data prepare` takes them: reST
sources of Python 3.11 and of Linux 6.1, PostgreSQL's manual without its markup, a dictionary of
computing, manual pages, and the running Python's standard library. One language (English), prose
and code. Nothing of it is kept in this repository; the licences are the packages' own.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.arguments import writable_folder
from megascale.data.sources import list_inputs

_LEAST_CHARACTERS = 200  # shorter ones are stubs and redirections


def _plain(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="ignore")


def _of_html(path: Path) -> str:
    text = re.sub(r"<(script|style|head)\b.*?</\1>", " ", _plain(path), flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", "", text)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(text)).strip()


def _of_roff(path: Path) -> str:
    """Macros and font changes go, words stay."""
    lines = [line for line in _plain(path).splitlines() if not line.startswith((".\\", "'\\"))]
    kept = [re.sub(r"^\.[A-Za-z]+ ?", "", line) for line in lines]
    return re.sub(r"\\f[BIRP]|\\&|\\-", lambda m: "-" if m[0] == "\\-" else "", "\n".join(kept))


# package, which of its files, and how they are read
SOURCES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "python3.11-doc": ("**/_sources/**/*.txt", _plain),
    "linux-doc-6.1": ("**/Documentation/**/*.rst.gz", _plain),
    "postgresql-doc-15": ("**/html/*.html", _of_html),
    "dict-foldoc": ("**/*.dict.dz", _plain),
    "manpages": ("**/man*/*.gz", _of_roff),
    "manpages-dev": ("**/man*/*.gz", _of_roff),
}


def documents(package: str, folder: Path) -> Iterator[str]:
    pattern, read = SOURCES[package]
    for path in sorted(folder.glob(pattern)):
        if not path.is_file() or path.is_symlink():
            continue
        text = read(path)
        pieces = re.split(r"\n(?=\S)", text) if package == "dict-foldoc" else [text]
        yield from (piece for piece in pieces if len(piece) >= _LEAST_CHARACTERS)


def write(path: Path, texts: Iterator[str]) -> int:
    total = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            total += len(text)
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=writable_folder)
    folder = parser.parse_args().folder
    for package in SOURCES:
        with tempfile.TemporaryDirectory() as name:
            subprocess.run(["apt-get", "download", package], cwd=name, check=True)
            deb = next(Path(name).glob("*.deb"))
            subprocess.run(["dpkg", "-x", deb, f"{name}/files"], check=True)
            size = write(folder / f"{package}.jsonl", documents(package, Path(name) / "files"))
        print(f"{package}: {size / 1e6:.1f} MB", flush=True)
    names = map(Path, list_inputs(["stdlib"]))
    python = (path.read_text(encoding="utf-8", errors="ignore") for path in names)
    print(f"stdlib: {write(folder / 'stdlib.jsonl', python) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
