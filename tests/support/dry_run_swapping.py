"""Makes dry runs of a small SD3 with blocks and activations in CPU memory; prints a JSON line with the peaks of each, in bytes."""

import json
import sys
from pathlib import Path

from dry_run_depths import SHALLOW, shallow
from retouch.models.parts import repeated_blocks
from retouch.recipe.recipe import load
from retouch_plan.dry_run import dry_run, quiet
from retouch_plan.machines import MACHINES
from retouch_plan.models import build_meta, with_blocks, write_folder

BLOCKS = {"num_layers": 7, "dual_attention_layers": 5}
SETTINGS = {
    "live": ("policy.prompt_embeddings=live",),
    "none": (),
    "swapped": ("devices.swap_blocks=6",),
    "8bit": ('policy.base={"quantize":"8bit"}',),
    "8bit swapped": ('policy.base={"quantize":"8bit"}', "devices.swap_blocks=6"),
    "activations": ("policy.gradient_checkpointing=cpu",),
}


def main(folder: Path) -> None:
    quiet()
    described = load("recipes/sd3/ocr-grpo.jsonnet").policy.model.published()
    transformer = {**described["transformer"], "config": with_blocks(described["transformer"]["config"], BLOCKS)}
    parts = {name: {**part, "config": shallow(part["config"], SHALLOW.get(name, {}))} for name, part in described.items()}
    write_folder(folder, {**parts, "transformer": transformer})
    shared = [f"policy.model.path={folder}", "policy.model.size=[256,256]", "policy.prompt_embeddings=cached", "devices={}"]
    shared += ["policy.gradient_checkpointing=true", "microbatch=1", "rollout.chunk=2", "rollout.num_steps=3", "tasks_per_step=1"]
    shared += ["group_size=2", "eval.tasks=2", "eval.batch=2", "eval.num_steps=2", "steps=1", "ranks=1"]
    found = {}
    for name, changes in SETTINGS.items():
        recipe = load("recipes/sd3/ocr-grpo.jsonnet", [*shared, *changes])
        made = dry_run(recipe, MACHINES["4090"])
        found[name] = {stage: each.peak for stage, each in made.stages.items()}
        found[f"{name}: seconds"] = made.stages["update"].work.seconds["copies that blocks wait for"]
    sizes = [2 * sum(weight.numel() for weight in block.parameters()) for block in repeated_blocks(build_meta(transformer))]
    found["blocks"] = sizes[-6:]
    sys.stdout.write(json.dumps(found) + "\n")


main(Path(sys.argv[1]))
