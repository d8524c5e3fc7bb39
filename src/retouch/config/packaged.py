"""Files that come with the package: recipes, and the prompt lists that they name."""

from difflib import get_close_matches
from pathlib import Path

SUFFIXES = (".jsonnet", ".json")
_FOLDER = "recipes"


def packaged_recipes() -> Path:
    """The folder of recipes that come with the package; in a source tree it is the ``recipes`` folder next to ``src``."""
    package = Path(__file__).resolve().parents[1]
    installed, source = package / _FOLDER, package.parents[1] / _FOLDER
    return installed if installed.is_dir() else source


def available() -> list[str]:
    """Names of the packaged recipes, in the form that ``find`` accepts: ``recipes/quickstart.jsonnet``."""
    folder = packaged_recipes()
    return sorted(f"{_FOLDER}/{file.relative_to(folder).as_posix()}" for file in folder.rglob("*") if file.suffix in SUFFIXES)


def short_name(name: str) -> str:
    """The short name of a packaged recipe: ``sd3/ocr-grpo`` for ``recipes/sd3/ocr-grpo.jsonnet``."""
    return name.removeprefix(f"{_FOLDER}/").rpartition(".")[0]


def near_names(name: str | Path) -> list[str]:
    """Short names of packaged recipes that are similar to ``name``, the most similar first; empty if none is."""
    path = Path(name)
    parts = (path.with_suffix("") if path.name else path).parts
    wanted = "/".join(parts[1:] if parts[:1] == (_FOLDER,) else parts)
    shorts = [short_name(each) for each in available()]
    same_end = [each for each in shorts if wanted and each.endswith(f"/{wanted}")]
    return list(dict.fromkeys([*same_end, *get_close_matches(wanted, shorts, n=3, cutoff=0.7)]))


def find(name: str | Path) -> Path:
    """The recipe file of that name, else the packaged recipe: ``recipes/sd3/ocr-grpo.jsonnet``, or ``sd3/ocr-grpo`` for short.

    Raises ValueError if there is neither; the message names the packaged recipes with similar names.
    """
    file = Path(name)
    if file.is_file():
        return file
    if not file.is_absolute():
        inside = Path(*file.parts[1:]) if file.parts[:1] == (_FOLDER,) else file
        for short in (inside, *(inside.with_name(inside.name + suffix) for suffix in SUFFIXES if inside.name)):
            if f"{_FOLDER}/{short.as_posix()}" in available():
                return packaged_recipes() / short
    what = "is a folder, not a recipe" if file.is_dir() else "no such file"
    near = near_names(name)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"{name}: {what}, and no packaged recipe has this name; {meant}`retouch recipes` lists them")


def is_recipe(name: str | Path) -> bool:
    """Whether ``find`` finds a recipe of that name."""
    try:
        find(name)
    except ValueError:
        return False
    return True


def shipped(name: str) -> Path:
    """The path of a file that a recipe names: the file itself if it exists, else the packaged file ``recipes/...`` of that name,
    else the name unchanged."""
    file = Path(name)
    packaged = packaged_recipes().joinpath(*file.parts[1:])
    return packaged if not file.exists() and file.parts[:1] == (_FOLDER,) and packaged.is_file() else file
