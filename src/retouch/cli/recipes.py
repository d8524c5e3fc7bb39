"""``retouch recipes``."""

import argparse
import re

from retouch.cli.arguments import Commands, debug_option


def add_recipes(commands: Commands) -> None:
    """Add the command."""
    recipes = commands.add_parser("recipes", parents=[debug_option()], help="list the packaged recipes, or describe one")
    recipes.add_argument(
        "name", nargs="?", metavar="NAME", help="part of a name, to filter the list; or a full name, to describe the recipe"
    )
    recipes.set_defaults(run=_recipes)


def _recipes(arguments: argparse.Namespace) -> int:
    from retouch.config.packaged import find, near_names
    from retouch.recipe.catalogue import TWIN, header, summaries

    wanted = (arguments.name or "").removeprefix("recipes/").removesuffix(".jsonnet")
    found = [each for each in summaries() if wanted in each.name]
    exact = [each for each in found if each.name == wanted]
    if not found:
        near = near_names(wanted)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{arguments.name}: no packaged recipe has this name{meant}")
    heads = ("name", "trains", "reward", "made for", "twin")
    rows = [
        (each.name, each.trains, " + ".join(each.rewards), each.hardware, "" if each.twin is None else f"...{TWIN}")
        for each in exact or found
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if exact:
        words = re.sub(r"\brecipes/([\w/-]+)\.jsonnet", r"\1", header(find(wanted)))  # a name works in any folder, a path does not
        print(f"\n{words}\n\nsteps: {exact[0].steps}\nfile: {find(wanted)}")
        return 0
    print(
        f"\nA twin, NAME{TWIN}, is the same recipe with tiny playground models, for a CPU.\n"
        "`retouch recipes NAME` describes a recipe, `retouch train NAME` runs it, `retouch doctor NAME` plans its memory."
    )
    return 0
