"""Errors that a user can cause or meet. Every message says what was got, what is legal, what to do.

The command line prints a `MegascaleError` as one line (no traceback) and exits with `exit_code`.
Broken invariants of our own are `assert`s that carry the values; they are not in this file.
"""

from __future__ import annotations


class MegascaleError(Exception):
    """Base of all errors shown to the user without a traceback."""

    exit_code = 1


class ConfigError(MegascaleError):
    """The configuration is refused: unknown key, illegal value, or values that contradict."""

    exit_code = 2


class DataError(MegascaleError):
    """Token files or text inputs are missing, empty, cut short, or of another tokenizer."""

    exit_code = 3


class CheckpointError(MegascaleError):
    """A checkpoint is missing, torn, corrupt, of another model, or could not be written."""

    exit_code = 4


class StorageError(CheckpointError):
    """A disk or an object store is full, gone, stalled, refuses, or holds less than was asked."""


class LaunchError(MegascaleError):
    """A rank failed to start or died, a port is in use, or peers did not arrive in time."""

    exit_code = 5


class NumericalError(MegascaleError):
    """A loss or gradient was not finite and the policy is to stop; or a value check failed."""

    exit_code = 6


class MissingExtraError(MegascaleError):
    """An optional dependency is not installed; the message names the extra to install."""

    exit_code = 7


class FluxError(MegascaleError):
    """A fused operator refuses its arguments or this machine, or a peer did not come."""

    exit_code = 8


def require_extra(module_name: str, extra: str) -> MissingExtraError:
    """Build the one-line error for an absent optional package `module_name` of extra `extra`."""
    return MissingExtraError(
        f"{module_name} is not installed; install it with: pip install 'megascale[{extra}]'"
    )
