"""SQL over the segments that are there now: an in-memory DuckDB with a view a table.

Views read the Parquet files of `segments.live_segments` in place and join their columns by name.
Beside each table that has steps is a view `current_TABLE` of the rows that still count
(`starts.py`). Retention and merging delete segments while a query runs: then the folder is listed
again and the query asked again. A segment that cannot be read is left out and named.

Costs, at 12,288 ranks x 1,000 steps x 10 phases on two cores: benchmarks/telemetry/query.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.errors import DataError, require_extra
from megascale.telemetry.store.segments import Segment, live_segments
from megascale.telemetry.store.tables import TABLES

RANK_BITS = 16  # up to so many ranks (2 to the power of it) are grouped by an array, not by hashes
_ATTEMPTS = 5
_OF_STEPS = ("steps", "sums", "spans")
_SQL_TYPES = {
    "int32": "INTEGER",
    "int64": "BIGINT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "bool": "BOOLEAN",
}


class Store:
    """The segments of one store folder as tables. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        try:
            import duckdb
        except ImportError:
            raise require_extra("duckdb", "telemetry") from None
        self.folder, self.segments = folder, list[Segment]()
        self.damaged: dict[Path, str] = {}
        self._where, self._repeats, self._is_gone = "TRUE", False, False
        self._duckdb = duckdb
        self._connection = duckdb.connect(":memory:")
        self._connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
        self._connection.execute("SET preserve_insertion_order = false")
        self._connection.execute(f"SET perfect_ht_threshold = {RANK_BITS}")
        if not self.refresh():
            self._make_views()

    def refresh(self) -> bool:
        """List the segments again; whether they are others than before."""
        found = [one for one in live_segments(self.folder) if one.path not in self.damaged]
        if found == self.segments:
            return False
        self._is_gone = not found and not self.damaged  # retention leaves something
        self.segments = found
        self._make_views()
        return True

    def keep(self, where: str, *, repeats: bool) -> None:
        """The rows of `current_` views: those for which `where` holds; with `repeats`, of several
        of one rank, start and step the one that was stored last."""
        self._where, self._repeats = where, repeats
        self._make_views()

    def register(self, name: str, table: Any) -> None:
        """An Arrow table under a name, for `where`."""
        self._connection.register(name, table)

    def columns(self, table: str) -> list[str]:
        return list(self._run(f"SELECT * FROM {table} LIMIT 0", ()).column_names)

    def table(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The result as an Arrow table. DataError: the query is none, or the store is damaged."""
        return self._run(sql, parameters)

    def of_segment(self, segment: Segment, table: str, sql: str) -> Any:
        """`sql` over one segment's file of `table`, there under the name `one`; None where the
        segment has none or is gone."""
        path = segment.table(table)
        if path is None:
            return None
        try:
            relation = f"read_parquet({_quoted(str(path))})"
            return self._connection.sql(sql.replace("{one}", relation)).to_arrow_table()
        except self._duckdb.IOException:
            return None

    def check_select(self, sql: str) -> None:
        """DataError: `sql` is anything but one query."""
        try:
            statements = self._connection.extract_statements(sql)
        except self._duckdb.Error as error:
            raise DataError(f"this is no SQL: {error}") from None
        allowed = (self._duckdb.StatementType.SELECT, self._duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in allowed:
            raise DataError(
                f"one SELECT is legal, got {len(statements)} statements: {sql[:120]!r}; tables: "
                + ", ".join(TABLES)
            )

    def close(self) -> None:
        self._connection.close()

    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:
        for _ in range(_ATTEMPTS):
            if self._is_gone:
                raise DataError(
                    f"all that was stored in {self.folder} is gone: was the run's folder deleted, "
                    "or is another run in its place?"
                )
            try:
                return self._connection.sql(sql, params=list(parameters)).to_arrow_table()
            except (self._duckdb.CatalogException, self._duckdb.BinderException) as error:
                raise DataError(f"{error}; tables: {', '.join(TABLES)}") from None
            except self._duckdb.Error as error:
                if not self.refresh() and not self._leave_out_damaged():
                    raise DataError(f"the store in {self.folder} cannot be read: {error}") from None
        raise DataError(
            f"segments in {self.folder} were deleted faster than they could be read, "
            f"{_ATTEMPTS} times in a row; ask for fewer steps, or raise telemetry.keep_gb"
        )

    def _leave_out_damaged(self) -> bool:
        """Find segments with a file that cannot be opened; whether there was one."""
        before = len(self.damaged)
        for segment in self.segments:
            for table in TABLES:
                path = segment.table(table)
                if path is None:
                    continue
                try:
                    self._connection.execute(f"SELECT * FROM read_parquet({_quoted(str(path))})")
                except self._duckdb.Error as error:
                    self.damaged[segment.path] = str(error).splitlines()[0]
                    break
        return len(self.damaged) > before and self.refresh()

    def _make_views(self) -> None:
        for table, columns in TABLES.items():
            self._make_view(table, columns)

    def _make_view(self, table: str, columns: Any) -> None:
        files = [path for one in self.segments if (path := one.table(table)) is not None]
        if files:
            names = ", ".join(_quoted(str(path)) for path in files)
            plain = f"SELECT * FROM read_parquet([{names}], union_by_name = true)"
        else:
            nulls = (f"NULL::{_SQL_TYPES[type_]} AS {name}" for name, type_ in columns.items())
            plain = f"SELECT {', '.join(nulls)} WHERE FALSE"
        statements = [f"CREATE OR REPLACE VIEW {table} AS {plain}"]
        if table in _OF_STEPS:
            kept = f"SELECT * FROM {table} AS counted WHERE {self._where}"
            if self._repeats and files and table != "spans":
                kept = (
                    f"SELECT * EXCLUDE (filename, file_row_number) FROM read_parquet([{names}], "
                    f"union_by_name = true, filename = true, file_row_number = true) "
                    f"AS counted WHERE {self._where} QUALIFY row_number() OVER "
                    "(PARTITION BY rank, start, step "
                    "ORDER BY filename DESC, file_row_number DESC) = 1"
                )
            statements.append(f"CREATE OR REPLACE VIEW current_{table} AS {kept}")
        for statement in statements:
            try:
                self._connection.execute(statement)
            except self._duckdb.Error as error:  # a file went between listing and looking
                if not self.refresh() and not self._leave_out_damaged():
                    raise DataError(f"the store in {self.folder} cannot be read: {error}") from None
                return


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
