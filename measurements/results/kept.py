"""The runs behind docs/results.md: one file per recipe and seed in `kept/`, and the digests that tell whether it is still valid.

A kept run is valid for its recipe as long as ``settings`` equals the digest of the evaluated recipe file and of the shipped weights
that the recipe reads. If ``code`` contains the digest of the current code, this code is known to compute the same run; otherwise
the first steps must be repeated (see `results.py`).
"""

import ast
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page import Entry

from retouch.models.train import IpAdapter
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import Recipe, load
from retouch_worlds.models.language import PlaygroundEmu3
from retouch_worlds.playground import playground_weights

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parent / "kept"
SOURCE = ROOT / "src"
SHIPPED = {
    "playground": "editor",
    "playground-writer": "writer",
    "playground-text-to-image": "text_to_image",
    "playground-enhancer": "enhancer",
    "playground-words": "words",
}
# Former names of keys (by the kind of their section, or "" for any kind) and of kinds, from which the digests were computed.
FORMER_NAMES = {
    ("playground", "impossible"): "vain",
    ("playground-indirect", "incomplete"): "lazy",
    ("playground-scenes", "incomplete"): "lazy",
    ("playground-words", "wrong_letters"): "slips",
    ("playground-words", "style_from_reference"): "apart",
    ("", "ignore_completions"): "blind",
}
FORMER_KINDS = {"playground-text-to-image": "playground-painter", "playground-scenes": "playground-paintings"}
FORMER_WEIGHTS = {"text_to_image": "painter"}  # by folder of the shipped weights
# The modules that determine the numbers of a run. The assembly and the records of a run change none of these numbers.
DENOISING = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch.models.pipeline",
    "retouch_models.qwen_image.model",
    "retouch.objectives.nft",
    "retouch.objectives.policy_gradient",
    "retouch.objectives.imitation",
    "retouch_worlds.measuring",
    "retouch_worlds.data",
    "retouch.policies.denoising",
    "retouch.renderers.base",
)
WRITING = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch_models.qwen_image.model",
    "retouch_models.qwen_image.responses",
    "retouch_models.qwen_vl",
    "retouch.objectives.imitation",
    "retouch.objectives.policy_gradient",
    "retouch_worlds.data",
    "retouch_worlds.measuring",
    "retouch.policies.autoregressive",
    "retouch_models.responses",
)
REWRITING = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch_models.qwen_image.model",
    "retouch_models.qwen_vl",
    "retouch.objectives.imitation",
    "retouch.objectives.policy_gradient",
    "retouch_worlds.measuring",
    "retouch_worlds.data",
    "retouch.policies.autoregressive",
    "retouch.renderers.prompts",
)
IMAGE_TOKENS = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch_models.emu3",
    "retouch.objectives.imitation",
    "retouch.objectives.policy_gradient",
    "retouch_worlds.measuring",
    "retouch_worlds.data",
    "retouch.policies.autoregressive",
    "retouch.renderers.base",
)
WORDS = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch_models.flux.model",
    "retouch.objectives.advantages",
    "retouch.objectives.nft",
    "retouch.objectives.dpo",
    "retouch.objectives.policy_gradient",
    "retouch.objectives.imitation",
    "retouch_worlds.data",
    "retouch.policies.denoising",
    "retouch.renderers.base",
    "retouch_rewards.ocr",
)
TEXT_TO_IMAGE = (
    "retouch.run.step",
    "retouch.data.tasks",
    "retouch_models.qwen_image.model",
    "retouch.objectives.policy_gradient",
    "retouch_worlds.measuring",
    "retouch_worlds.data",
    "retouch.policies.denoising",
    "retouch.renderers.base",
)
# Additional modules for a run that trains an IP-Adapter.
REFERENCED = (
    "retouch.models.ip_adapter",
    "retouch_worlds.measuring",
)
# By the kind of the model if it has an entry, else by the kind of the renderer; None if the policy renders its own images.
DECIDING = {
    None: DENOISING,
    "response": WRITING,
    "prompt": REWRITING,
    "codes": IMAGE_TOKENS,
    "playground-words": WORDS,
    "playground-text-to-image": TEXT_TO_IMAGE,
}


def place(entry: Entry, seed: int) -> Path:
    """The file of one run: `quickstart-seed-0.json`, or `playground-nft-seed-0.json` for a recipe in a subfolder."""
    name = entry.recipe.removeprefix("recipes/").removesuffix(".jsonnet").replace("/", "-")
    return KEPT / f"{name}-seed-{seed}.json"


def read(entry: Entry, seed: int) -> dict | None:
    """The kept run of a recipe and seed, or None if there is no file."""
    file = place(entry, seed)
    return json.loads(file.read_text()) if file.exists() else None


def write(entry: Entry, known: dict) -> None:
    """Keep a run: its ``result``, the ``trace`` of its first steps, and the digests of its settings and code."""
    KEPT.mkdir(exist_ok=True)
    place(entry, known["result"]["seed"]).write_text(json.dumps(known, indent=2) + "\n")


def settings_digest(entry: Entry) -> str:
    """SHA-256 of the settings in the recipe's file, and of the shipped weights that the run reads.

    Defaults are left out, so a new key in the schema leaves kept runs valid; `code_digest` detects a changed default. Renamed keys
    and kinds count under their former names, so a new name leaves kept runs valid too."""
    whole = hashlib.sha256(_text(_with_former_names(evaluate(ROOT / entry.recipe))))
    recipe = load(ROOT / entry.recipe)
    named = {
        f"{FORMER_WEIGHTS.get(name, name)}/{file.relative_to(playground_weights(name)).as_posix()}": file
        for name in _used_weights(recipe)
        for file in playground_weights(name).rglob("*.safetensors")
    }
    for name, file in sorted(named.items()):
        whole.update(f"retouch/playground/weights/{name}".encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:16]


def _with_former_names(node: Any) -> Any:
    if isinstance(node, dict):
        named = {FORMER_NAMES.get((node.get("kind"), key), FORMER_NAMES.get(("", key), key)): inner for key, inner in node.items()}
        return {key: _with_former_names(FORMER_KINDS.get(inner, inner) if key == "kind" else inner) for key, inner in named.items()}
    return [_with_former_names(entry) for entry in node] if isinstance(node, list) else node


def code_digest(entry: Entry) -> str:
    """SHA-256 of the recipe with its defaults, and of the code that computes its runs, without docstrings and annotations."""
    recipe = load(ROOT / entry.recipe)
    own: Any = recipe.policy.model.kind
    modules = DECIDING[own if own in DECIDING else recipe.renderer and recipe.renderer.kind]
    whole = hashlib.sha256(_text(recipe.document()))
    for file in _with_imports((*modules, *REFERENCED) if isinstance(recipe.policy.train, IpAdapter) else modules):
        if file.name not in ("types.py", "protocols.py"):  # these contain only declarations
            whole.update(file.relative_to(SOURCE).as_posix().encode() + _without_prose(file.read_text()).encode())
    return whole.hexdigest()[:16]


def _text(document: dict[str, Any]) -> bytes:
    settings = {key: value for key, value in document.items() if key not in ("seed", "name", "out")}
    return json.dumps(settings, sort_keys=True).encode()


def _used_weights(recipe: Recipe) -> set[str]:
    """The folders of shipped weights from which the models of the recipe are loaded."""
    model = recipe.policy.model
    if isinstance(model, PlaygroundEmu3):
        return {"emu3/autoencoder", f"emu3/{model.start}"}
    sight = {"sight"} if isinstance(recipe.policy.train, IpAdapter) else set()
    return sight | {SHIPPED[model.kind] for model in (model, recipe.image_model) if model.kind in SHIPPED}


def _with_imports(modules: Sequence[str]) -> list[Path]:
    """The files of the modules and of everything that they import from the package, sorted."""
    missing = [module for module in modules if not _file(module).is_file()]
    assert not missing, f"measurements/results/kept.py lists modules that are gone: {missing}"
    found: set[Path] = set()
    open_ends = list(modules)
    while open_ends:
        file = _file(open_ends.pop())
        if not file.is_file() or file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("retouch"):
                open_ends += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)


def _file(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def _without_prose(code: str) -> str:
    """The syntax tree as a text, without docstrings and annotations of functions, which change no number."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)
