"""Object stores and remote file systems, through fsspec: s3, gs, abfs, hdfs, webhdfs, memory, ...

What they lack is made up for here:
- no folders (S3 has only names): `claim` writes a hidden file; where the store can refuse to write
  over a name it does so, else one writer must claim;
- no rename (S3): a file that is put there in one request appears whole by itself. Where files grow
  under their names (HDFS), `put` writes beside and moves; between the two there may be no file;
- listings that are remembered: they are switched off, other machines write too.

The libraries retry what is worth it; what remains is told as a StorageError, whatever its class.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from megascale.errors import ConfigError, MissingExtraError, StorageError, require_extra
from megascale.storage.interface import BLOCK_BYTES
from megascale.storage.multipart import MultipartUpload
from megascale.storage.streamed import StreamedFile
from megascale.storage.waiting import DEFAULT_STALL_S, Stalled, answer, move_all

T = TypeVar("T")
CLAIM = ".claimed"  # the hidden file that stands for a folder
TEMPORARY = ".tmp"
NUM_READERS = 4
_S3 = {"s3", "s3a"}
# One request writes a whole file under its name. All others write beside and move.
_WHOLE_FILES = {*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
_REFUSE_TO_REPLACE = {*_S3, "memory"}
_NEEDS = {
    "hdfs": "; hdfs:// needs Java and Hadoop's libhdfs on each node (JAVA_HOME, HADOOP_HOME, "
    "CLASSPATH), webhdfs://HOST:9870/PATH needs neither"
}
_UNTOUCHED = "Nothing was committed, older checkpoints are untouched, training can go on"


def open_remote(url: str, *, stall_s: float = DEFAULT_STALL_S) -> RemoteFolder:
    """Raises ConfigError, MissingExtraError, or StorageError where opening it needs a server."""
    import fsspec

    protocol = url.partition("://")[0].lower()
    known = {*fsspec.registry, *fsspec.available_protocols()}
    if protocol not in known:
        raise ConfigError(
            f"storage {url!r}: nobody knows the protocol {protocol!r}; give a folder, or one of "
            f"{', '.join(sorted(known & {'s3', 'gs', 'abfs', 'hdfs', 'webhdfs', 'memory'}))}"
        )
    try:
        importlib.import_module(fsspec.get_filesystem_class(protocol).__module__)
    except ImportError as error:
        raise _what_to_install(protocol, error) from None
    doing = f"opening {url}"

    def reach() -> tuple[Any, str]:
        return answer(
            lambda: fsspec.url_to_fs(url, **_options(protocol, stall_s)),
            doing=doing,
            stall_s=stall_s,
        )

    try:
        system, path = reach()
    except StorageError:
        raise
    except Exception as error:  # each library has its own
        raise StorageError(f"{doing}: {_reason(error)}{_NEEDS.get(protocol, '')}") from error
    return RemoteFolder(url, system, path, protocol, stall_s=stall_s, again=lambda: reach()[0])


def _what_to_install(protocol: str, error: ImportError) -> MissingExtraError:
    if protocol in _S3:
        return require_extra("s3fs", "s3")
    return MissingExtraError(f"{protocol}:// needs a library that is not installed: {error}")


def _options(protocol: str, stall_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in _S3:
        options["config_kwargs"] = {"connect_timeout": stall_s, "read_timeout": stall_s}
    return options


class RemoteFolder:
    """`path` of an fsspec file system.

    again  the same file system once more: after a fork, in which its connections and threads are
           not to be used
    """

    is_local = False

    def __init__(
        self,
        url: str,
        system: Any,
        path: str,
        protocol: str,
        *,
        stall_s: float = DEFAULT_STALL_S,
        again: Callable[[], Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._reached, self._pid = system, os.getpid()
        self._again = again
        self._root, self._stall_s = path.rstrip("/"), stall_s
        self._protocol = protocol

    @property
    def _system(self) -> Any:
        if self._pid != os.getpid() and self._again is not None:
            self._reached, self._pid = self._again(), os.getpid()
        return self._reached

    def claim(self, folder: str) -> bool:
        def make() -> bool:
            if self._system.exists(self._path(folder)):
                return False
            self._make_parent(f"{folder}/{CLAIM}")
            refusing = {"mode": "create"} if self._protocol in _REFUSE_TO_REPLACE else {}
            try:
                self._system.pipe_file(self._path(f"{folder}/{CLAIM}"), b"", **refusing)
            except FileExistsError:
                return False
            return True

        return self._ask(make, f"making {folder} in {self.url}")

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder)

        def look() -> list[str]:
            try:
                found = self._system.ls(path, detail=False)
            except FileNotFoundError:
                return []
            names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found if entry != path}
            return sorted(names - {CLAIM, ""})

        return self._ask(look, f"listing {folder or 'what lies'} in {self.url}")

    def size(self, name: str) -> int | None:
        def look() -> int | None:
            try:
                info = self._system.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

        return self._ask(look, f"looking for {name} in {self.url}")

    def modified_s(self, name: str) -> float | None:
        """Seconds since 1970; None where there is no such file, or nobody knows."""

        def look() -> float | None:
            try:
                modified = self._system.modified(self._path(name))
            except (FileNotFoundError, NotImplementedError):
                return None
            return float(modified.timestamp()) if modified is not None else None

        return self._ask(look, f"looking for {name} in {self.url}")

    def write(
        self, name: str, parts: Iterable[memoryview], moved: Callable[[int], None] = lambda _: None
    ) -> None:
        doing = f"writing {name} to {self.url}"
        self._ask(lambda: self._make_parent(name), doing)
        make = MultipartUpload if self._protocol in _S3 else StreamedFile
        file = make(self._system, self._path(name), doing=doing, stall_s=self._stall_s, moved=moved)
        try:
            for part in parts:  # whose own errors are the caller's
                with self._explained(doing):
                    file.append(part)
            with self._explained(doing):
                file.finish()
        except Stalled:
            raise
        except BaseException:
            file.abort()
            raise

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def replace() -> None:
            if self._protocol in _WHOLE_FILES:
                self._system.pipe_file(path, data)
                return
            self._make_parent(name)
            self._system.pipe_file(path + TEMPORARY, data)
            if self._system.exists(path):
                self._system.rm(path)
            self._system.mv(path + TEMPORARY, path)

        self._ask(replace, f"writing {name} to {self.url}")

    def get(self, name: str) -> bytes:
        path = self._path(name)
        return self._ask(
            lambda: bytes(self._system.cat_file(path)), f"reading {name} of {self.url}"
        )

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        doing = f"reading {name} of {self.url}"
        path, out = self._path(name), out.cast("B")
        # fsspec's hdfs opens a stream for what starts at 0, and then cannot find the start in it.
        seekable = {"seekable": True} if self._protocol == "hdfs" else {}

        def read(position: int) -> int:
            block = out[position : position + BLOCK_BYTES]
            begin = start + position
            data = self._system.cat_file(path, start=begin, end=begin + block.nbytes, **seekable)
            if len(data) != block.nbytes:
                raise EOFError
            block[:] = data
            return block.nbytes

        starts = range(0, out.nbytes, BLOCK_BYTES)
        num_threads = min(NUM_READERS, len(starts))
        with self._explained(doing):
            try:
                move_all(starts, read, doing=doing, stall_s=self._stall_s, num_threads=num_threads)
            except (EOFError, OSError, ValueError):  # past the end each library fails as it likes
                num_bytes = self.size(name)
                if num_bytes is None or start + out.nbytes <= num_bytes:
                    raise
                raise StorageError(
                    f"{self.url}: {name} ends at byte {num_bytes:,}, byte "
                    f"{start + out.nbytes:,} was asked for; it was cut short, use another copy"
                ) from None

    def remove(self, name: str) -> None:
        def take_away() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(self._path(name), recursive=True)

        self._ask(take_away, f"removing {name} from {self.url}")

    def free_bytes(self) -> int | None:
        return None

    def _make_parent(self, name: str) -> None:
        """Object stores have no folders, all others want them first."""
        if self._protocol not in _WHOLE_FILES:
            self._system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _ask(self, call: Callable[[], T], doing: str) -> T:
        with self._explained(doing):
            return answer(call, doing=doing, stall_s=self._stall_s)

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Whatever the library raised, as one error that says what to do."""
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise StorageError(f"{doing}: not there ({_reason(error)})") from error
        except Exception as error:  # each library has its own
            raise StorageError(
                f"{doing}: {_reason(error)}; see that the address, the credentials and the room "
                f"are right. {_UNTOUCHED}"
            ) from error


def _reason(error: BaseException) -> str:
    """Its first line: libraries add pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
