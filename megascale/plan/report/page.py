"""A plan as one HTML file: the text's answer, and plots. Opens without a network.

The plots are data for plotly.js, which the package `plotly` (the extra `plan`) brings along and
which is written into the file: 5 MB, once, for a page that can be mailed.
"""

from __future__ import annotations

import importlib
import json
from html import escape
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError, require_extra
from megascale.plan.report.plots import Figure, figures
from megascale.plan.report.text import plan_text
from megascale.plan.search.explain import describe_layout
from megascale.plan.search.result import Plan

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
pre { background: #f6f8fa; border-radius: 6px; overflow-x: auto; padding: 1rem; }
h2 { margin: 2rem 0 0; } p.caption { color: #57606a; margin: 0; }
.plot { height: 26rem; }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3; } pre { background: #161b22; }
  p.caption { color: #9198a1; }
}
"""

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const ink = dark ? "#e6edf3" : "#1f2328", lines = dark ? "#30363d" : "#d8dee4";
for (const figure of JSON.parse(document.getElementById("figures").textContent)) {
  const axis = { gridcolor: lines, zerolinecolor: lines };
  Plotly.newPlot(figure.id, figure.data, { ...figure.layout,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink },
    xaxis: { ...figure.layout.xaxis, ...axis }, yaxis: { ...figure.layout.yaxis, ...axis },
  }, { responsive: true, displaylogo: false });
}
"""


def check_report(path: Path | None) -> None:
    """Raises before anything is computed where the page could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(
            f"--report {path} is a folder; name a file in it, such as {path}/plan.html"
        )
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--report {path}: it is a page; give it a name that ends in .html")
    folder = path.parent
    if not folder.is_dir():
        near = next(one for one in folder.absolute().parents if one.is_dir())
        raise ConfigError(
            f"--report {path}: the folder {folder} does not exist; make it, or write into {near}"
        )
    _plotly_js()


def write_page(plan: Plan, path: Path) -> None:
    try:
        path.write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from None


def page(plan: Plan) -> str:
    """The whole file."""
    found = figures(plan)
    title = f"{plan.num_devices} x {plan.device}: {describe_layout(plan.best.layout)}"
    sections = "\n".join(_section(figure) for figure in found)
    data = json.dumps([_data(figure) for figure in found], allow_nan=False)
    data = data.replace("</", r"<\/")  # a string of JSON must not end the script that holds it
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<script>{_plotly_js()}</script>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="caption">Predicted, not measured.</p>
<pre>{escape(plan_text(plan))}</pre>
{sections}
<script type="application/json" id="figures">{data}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _section(figure: Figure) -> str:
    return (
        f"<h2>{escape(figure.title)}</h2>\n"
        f'<p class="caption">{escape(figure.caption)}</p>\n'
        f'<div class="plot" id="{figure.name}"></div>'
    )


def _data(figure: Figure) -> dict[str, Any]:
    return {"id": figure.name, "data": figure.traces, "layout": figure.layout}


def _plotly_js() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise require_extra("plotly", "plan") from None
    return str(offline.get_plotlyjs())
