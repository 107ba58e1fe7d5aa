"""`megascale run --render`: what Kubernetes is to have, written out and applied by nobody.

Of the command line count those words that the documents depend on. No cluster is asked, and no
client is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.cluster.backends.base import AgentStart, parse_options
from megascale.cluster.backends.kubernetes_manifests import KubernetesOptions
from megascale.cluster.backends.kubernetes_render import driver_name, render
from megascale.cluster.driver.session import FOLDER
from megascale.config import load_config
from megascale.errors import ConfigError

PORT = 8000  # of the driver, where --port says none
AGENT = ("python3", "-m", "megascale.cluster.agent")  # of the image


def render_run(
    words: Sequence[str],
    *,
    script: bool,
    run_dir: Path | None,
    overrides: Sequence[str],
    nodes: int,
    procs_per_node: int,
    spares: int | None,
    backend: str,
    options: Mapping[str, Any],
    port: int,
) -> str:
    """YAML for kubectl. Raises MegascaleError for what a run would refuse too."""
    if backend != "kubernetes":
        raise ConfigError(
            f"--render with --backend {backend}: only kubernetes has documents to write; add "
            "--backend kubernetes"
        )
    parsed = parse_options(KubernetesOptions, "kubernetes", options)
    if script:
        folder, cluster = run_dir, load_config(None, overrides).cluster
    elif len(words) == 1 and run_dir is None:
        config = load_config(Path(words[0]), overrides)
        config.mesh(nodes * procs_per_node)
        folder, cluster = Path(config.job.run_dir), config.cluster
    else:
        raise ConfigError(
            f"a recipe is wanted, got {' '.join(words)}; give one TOML file, or --script and "
            "--run-dir"
        )
    if folder is None or not folder.is_absolute():
        raise ConfigError(
            f"the run folder is {folder}; pods have it where the volume claim is mounted, so give "
            "it from the root: --set job.run_dir=/runs/mine, with --script --run-dir /runs/mine"
        )
    start = AgentStart(
        AGENT,
        f"http://{driver_name(parsed)}:{port or PORT}",
        str(folder / FOLDER / "token"),
        str(folder),
    )
    return render(
        start,
        nodes,
        procs_per_node=procs_per_node,
        spares=cluster.spares if spares is None else spares,
        options=options,
    )
