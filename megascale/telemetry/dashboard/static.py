"""The files of the page, from this package, read once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from megascale.telemetry.dashboard.answers import Body

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files() -> Mapping[str, Body]:
    """By path, as a browser asks for it; `/` is the page."""
    found = {}
    for file in files("megascale.telemetry.dashboard").joinpath("page").iterdir():
        media = _MEDIA.get(file.name[file.name.rfind(".") :])
        if media is not None:
            found[f"/page/{file.name}"] = Body(file.read_bytes(), media)
    assert "/page/index.html" in found, f"the package has no page, only {sorted(found)}"
    found["/"] = found["/page/index.html"]
    found["/favicon.ico"] = found["/page/favicon.svg"]
    return found
