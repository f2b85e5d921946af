from pathlib import Path

import pytest

from headrace.config_file import load_config

RECIPES = sorted((Path(__file__).parent.parent / "src" / "headrace" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_says_what_it_is(path):
    load_config(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_recipes_are_found():
    assert {"demo", "smollm2"} <= {path.stem for path in RECIPES}
