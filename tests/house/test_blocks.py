"""Generated blocks replace only themselves, and filling twice changes nothing."""

from __future__ import annotations

import pytest

from tools.blocks import fill

PAGE = """# Title

<!-- table: step -->
old
<!-- end table -->

by hand
<!-- table: flux op=ag_gemm -->
<!-- end table -->
"""


def test_each_block_gets_its_own_body_and_the_rest_stays() -> None:
    filled = fill(PAGE, "table", lambda spec: f"[{spec}]\n")
    assert filled == PAGE.replace("old\n", "[step]\n").replace(
        "op=ag_gemm -->\n", "op=ag_gemm -->\n[flux op=ag_gemm]\n"
    )
    assert fill(filled, "table", lambda spec: f"[{spec}]\n") == filled


def test_blocks_of_another_kind_are_left_alone() -> None:
    assert fill(PAGE, "reference", lambda _: "new\n") == PAGE


def test_a_block_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 blocks .* are opened, 2 are closed"):
        fill(PAGE + "<!-- table: open -->\n", "table", lambda _: "")
