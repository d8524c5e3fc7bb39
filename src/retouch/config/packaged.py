"""Files that come with the package: recipes, also as a table of what they train, and the prompt lists that they name."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
    files = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.parent.name != "lib")
    return sorted(f"{_FOLDER}/{file.relative_to(folder).as_posix()}" for file in files)


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


TWIN = "-playground"
"""The ending of a twin's name."""
_VARIABLE = re.compile(r"std\.extVar\('(\w+)'\)")
_TRAINED = {"lora": "LoRA", "full": "all weights", "ip-adapter": "IP-Adapter"}


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """One packaged recipe. ``goal``: what it is for (``GOALS``). ``gpus``: 0 for a recipe that is made for a CPU. ``cards``: the
    sizes of GPUs that it has values for, such as ``24gb``. ``twin``: the short name of its twin, if it has one.

    ``variables``: environment variables that it reads. ``steps``: its length, as text: ``200 (supervised) + 150 (rl)``.
    """

    name: str
    goal: str
    trains: str
    rewards: tuple[str, ...]
    gpus: int
    cards: tuple[str, ...]
    twin: str | None
    variables: tuple[str, ...]
    steps: str

    @property
    def hardware(self) -> str:
        """The hardware that the recipe is made for, as text."""
        cards = f", {self.cards[0]} to {self.cards[-1]}" if self.cards else ""
        return "CPU" if self.gpus == 0 else f"{self.gpus} GPU{'s' * (self.gpus > 1)}{cards}"


def summaries() -> Iterator[RecipeSummary]:
    """Every packaged recipe, by name."""
    import rjsonnet

    names = [short_name(name) for name in available()]
    shared = {file.name: file.read_text(encoding="utf-8") for file in (packaged_recipes() / "lib").glob("*.libsonnet")}
    for path, name in zip(available(), names, strict=True):
        file = packaged_recipes().parent / path
        variables = _variables(file.read_text(encoding="utf-8"), shared)
        # The name of each variable is its value. No child process is needed: packaged recipes terminate.
        values = {variable: variable for variable in variables}
        document = json.loads(rjsonnet.evaluate_file(str(file), jpathdir=[str(packaged_recipes())], ext_vars=values))
        model, how, reward = document["policy"]["model"], document["policy"]["train"]["kind"], document.get("reward", {})
        weights = str(model.get("path") or "")
        local = not weights or weights.startswith(variables)  # the name of a user's folder says nothing about the model
        trained = str(model.get("class", "")).rpartition(":")[2] or (model["kind"] if local else Path(weights).name)
        lengths = []
        for phase in document.get("phases") or [document]:
            length = f"{phase['passes']:g} passes over the data" if phase.get("passes") else str(phase.get("steps"))
            lengths.append(length if phase is document else f"{length} ({phase['name']})")
        small = str(model["kind"]).startswith("playground") or document.get("device") == "cpu"
        parts = reward.get("rewards") or {"": reward}
        yield RecipeSummary(
            name=name,
            goal=_goal(document),
            trains=f"{trained}, {_TRAINED.get(how, how)}",
            rewards=tuple(dict.fromkeys(str(part.get("kind", "")) for part in parts.values())),
            gpus=0 if small else int(document.get("ranks") or 1),
            cards=tuple(document.get("cards") or ()),
            twin=f"{name}{TWIN}" if f"{name}{TWIN}" in names else None,
            variables=variables,
            steps=" + ".join(lengths),
        )


GOALS = ("edit photos", "follow prompts", "render words", "human preference", "write prompts", "image tokens")
"""What a recipe is for, in the order of `retouch recipes`."""


def _goal(document: Mapping[str, Any]) -> str:
    reward, renderer = json.dumps(document.get("reward", {})), document.get("renderer") or {}
    kind = str(document["policy"]["model"]["kind"])
    if renderer:
        return "image tokens" if renderer.get("kind") == "codes" else "write prompts"
    if '"ocr"' in reward:
        return "render words"
    if "edit" in kind or kind in ("playground", "flux-kontext") or document.get("data", {}).get("kind") == "folder":
        return "edit photos"
    return "human preference" if any(name in reward for name in ("pickscore", "hps", "image_reward")) else "follow prompts"


def header(file: Path) -> str:
    """The comment at the beginning of a recipe: what it does, and how it is started."""
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].removeprefix(" "))
    return "\n".join(lines)


def _variables(text: str, shared: Mapping[str, str]) -> tuple[str, ...]:
    """The environment variables that a recipe reads, itself or in the libraries that it imports."""
    found, seen, left = list(_VARIABLE.findall(text)), set[str](), [text]
    while left:
        for name in re.findall(r"lib/(\w+\.libsonnet)|import '(\w+\.libsonnet)'", left.pop()):
            library = name[0] or name[1]
            if library not in seen and library in shared:
                seen.add(library)
                left.append(shared[library])
                found += _VARIABLE.findall(shared[library])
    return tuple(dict.fromkeys(found))
