"""`docs/configuration.md` says what the configuration classes say."""

from __future__ import annotations

from megascale.config import RunConfig
from tools import config_reference
from tools.blocks import update


def test_the_page_is_up_to_date() -> None:
    pages = [config_reference.PAGE]
    assert update(pages, "reference", config_reference.render, check=True) == 0


def test_every_section_is_on_the_page_and_nested_ones_follow_their_owner() -> None:
    names = list(config_reference.sections())
    assert [name for name in names if "." not in name] == list(RunConfig.model_fields)
    assert names.index("training.batch_ramp_up") == names.index("training") + 1


def test_a_row_shows_type_bounds_default_and_description() -> None:
    text = config_reference.render("sections")
    assert "| `lr` | float > 0 | `0.0003` |" in text
    assert '| `backend` | `"auto"`, `"gloo"`, `"nccl"` | `"auto"` |' in text
    assert "| `start` | int >= 1 | required |" in text
    assert "None: as num_heads" in text
