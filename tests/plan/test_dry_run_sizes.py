"""A dry run of any size of images and chunks: it runs, or the message is about the recipe."""

import json
from pathlib import Path

import pytest
import torch

from retouch.recipe.recipe import load
from retouch_plan.estimate import explained
from warm_python import run_python

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
FULL_SIZE = sorted(
    str(path.relative_to(ROOT / "recipes").with_suffix(""))
    for path in (ROOT / "recipes").glob("*/*.jsonnet")
    if path.parent.name not in ("playground", "lib") and not path.stem.endswith("-playground") and path.stem != "tiny"
)
DECODED = """
import torch
from retouch_plan.accelerator import Accelerator, register
from retouch_plan.accelerator import DEVICE
import tiny_models
from retouch.models.pipeline import Latents

register()
with Accelerator(), torch.no_grad():
    vae = tiny_models.sd3_vae().to(torch.device(DEVICE, 0))
    latents = Latents(vae)
    side = 1024 // latents.latent_pixels
    x = torch.zeros(128, latents.channels, side, side, device=torch.device(DEVICE, 0))
    images = latents.decode(x, (1024, 1024))
print(len(images), images[0].size, images[0].mode)
"""


def test_point_2_3_a_chunk_of_128_large_images_is_decoded_in_a_dry_run():
    printed = run_python("-c", DECODED, search=[SUPPORT], timeout=300)
    assert printed.splitlines()[-1:] == ["128 (1024, 1024) RGB"]


def test_point_2_3_only_a_message_for_the_user_blames_the_recipe(capsys):
    with pytest.raises(ValueError, match="missing") as mistake:
        load("missing.jsonnet")
    assert explained(mistake.value) == (str(mistake.value), "correct the recipe as the message says")
    assert capsys.readouterr().err == ""
    with pytest.raises(RuntimeError) as internal:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    text, fix = explained(internal.value)
    assert f"RuntimeError: {internal.value}\n  at {__file__}" in text
    assert fix.startswith("the recipe is not the cause: report this error")
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_SIZE)
def test_point_2_3_dry_runs_of_full_size_recipes_work_at_every_size_and_chunk(name):
    printed = run_python(SUPPORT / "dry_run_sizes.py", name, search=[SUPPORT], timeout=850)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) in (2, 6)
    assert [line for line in found if "stages" not in line] == []
