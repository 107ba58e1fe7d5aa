"""What the dashboard was given: a run's folder, or the address of the driver that runs it.

A folder of a run with a driver has the driver's address and token in it (`driver/address.json`,
`driver/token`), so either leads to the other. The token is read from its file each time it is
needed: a driver that starts again keeps it, another job does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megascale.env import TOKEN_FILE
from megascale.errors import DataError, LaunchError
from megascale.telemetry.dashboard.driver import Driver

_FOLDER = "driver"  # of the run folder, as the driver makes it


@dataclass(frozen=True)
class Source:
    """run_dir: a folder that this machine can read, perhaps not there yet. driver: None: nobody."""

    run_dir: Path
    driver: Driver | None


def is_address(given: str) -> bool:
    return urlsplit(given).scheme in ("http", "https")


def find_source(given: str, token_file: Path | None) -> Source:
    """`given` is RUN_DIR or http://HOST:PORT of a driver, whose token `token_file` then holds.

    Raises DataError for what is neither; LaunchError for a driver that does not answer, or that
    will not have the token.
    """
    if is_address(given):
        if token_file is None:
            raise LaunchError(
                f"{given} is a driver, which answers nobody without its token; give the file with "
                f"--token-file RUN_DIR/driver/token, or in {TOKEN_FILE}"
            )
        driver = Driver(given, token_file)
        return Source(_its_run_dir(driver), driver)
    folder = Path(given)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; give the folder of a run, or http://HOST:PORT")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise DataError(
            f"there is no {folder}, nor the folder that it would be in; give the folder of a run"
        )
    return Source(folder, driver_beside(folder))


def driver_beside(run_dir: Path) -> Driver | None:
    """The driver whose address lies in the folder, whether it lives or not; None: no such file."""
    try:
        url = json.loads((run_dir / _FOLDER / "address.json").read_text())["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https"):
        return None
    return Driver(url, run_dir / _FOLDER / "token")


def _its_run_dir(driver: Driver) -> Path:
    run_dir = Path(str(driver.status().get("run_dir", "")))
    if not run_dir.is_absolute():
        run_dir = run_dir.absolute()
    if not run_dir.is_dir():
        raise DataError(
            f"the driver at {driver.url} has its run in {run_dir}, which this machine cannot see; "
            "start the dashboard where the run's folder is mounted"
        )
    return run_dir
