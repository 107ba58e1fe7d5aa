"""`python -m megascale.cluster.agent`: the agent of one node, until the driver lets it go."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from megascale.cluster.agent.agent import Agent, Settings
from megascale.cluster.agent.facts import address_towards
from megascale.config.cluster import ClusterConfig
from megascale.env import hostname
from megascale.errors import MegascaleError


def parse(arguments: list[str]) -> Settings:
    parser = argparse.ArgumentParser(prog="megascale agent", description=__doc__)
    add = parser.add_argument
    add("--driver", required=True, metavar="URL", help="http://HOST:PORT of the driver")
    add("--token-file", required=True, type=Path, help="the driver's token, never the token itself")
    add("--node", required=True, help="name to join as")
    add(
        "--run-dir", required=True, type=Path, help="job.run_dir; the agent keeps agents/NODE there"
    )
    add("--host-name", default=hostname(), metavar="H", help="default: this machine's")
    add("--ip", help="default: this machine's address towards the driver")
    add("--switch", help="the leaf switch of this node, where known")
    add(
        "--orphan-timeout", type=float, metavar="S", help="without a driver, until one says its own"
    )
    add("--fake-devices", type=Path, metavar="FILE", help="JSON in place of NVML (tests)")
    add("--sys-root", type=Path, default=Path("/sys"), help="where interfaces are read")
    add("--kernel-log", type=Path, default=Path("/dev/kmsg"), help="where the kernel's log is read")
    add(
        "--check-margin", type=float, default=10.0, metavar="S", help="of a self-check, then killed"
    )
    got = parser.parse_args(arguments)
    default_s = ClusterConfig.model_fields["orphan_timeout_s"].default
    return Settings(
        driver_url=got.driver,
        token_file=got.token_file,
        node=got.node,
        run_dir=got.run_dir,
        host=got.host_name,
        ip=got.ip or address_towards(got.driver),
        switch=got.switch,
        orphan_timeout_s=default_s if got.orphan_timeout is None else got.orphan_timeout,
        sys_root=got.sys_root,
        kernel_log=got.kernel_log,
        fake_devices=got.fake_devices,
        check_margin_s=got.check_margin,
    )


def main(arguments: list[str]) -> int:
    settings = parse(arguments)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s [agent {settings.node}] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return Agent(settings).run()
    except MegascaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
