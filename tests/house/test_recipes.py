"""Every recipe is a legal configuration on the number of ranks that its first lines name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megascale.config import load_config
from tools.blocks import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_loads_and_fits_its_ranks(recipe: Path) -> None:
    config = load_config(recipe)
    ranks = re.search(r"^# Ranks: (\d+)", recipe.read_text(), re.MULTILINE)
    assert ranks, f"{recipe.name} has no line `# Ranks: N`"
    mesh = config.mesh(int(ranks[1]))
    assert mesh.world_size == int(ranks[1])
    assert config.data.synthetic != any(config.data.folders)


def test_there_are_recipes() -> None:
    assert "first-run" in {path.stem for path in RECIPES}
