"""A user of an IP-Adapter trainer with a reward server brings a folder of triplets, an adapter and running servers."""

import base64
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw

import loopback
import retouch
import tiny_models
import tiny_towers
from retouch.cli import main
from retouch.data.guard import find_test_sets
from retouch.data.tasks import Tasks
from retouch.recipe.recipe import load
from retouch.types import Sample, Task
from retouch_models.flux.model import FillLatents
from retouch_models.triplets import TripletRows

SIDE = 32
BOX = (8, 8, 23, 15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three items whose ref is a whole image, larger than the source; the second line is a prompt already."""
    root = tmp_path / "mine"
    root.mkdir()
    for number in (1, 2, 3):
        mask = Image.new("L", (SIDE, SIDE))
        ImageDraw.Draw(mask).rectangle((BOX[0], BOX[1], BOX[2], BOX[3]), fill=255)
        Image.new("RGB", (SIDE, SIDE), (number, 0, 0)).save(root / f"{number}_source.png")
        mask.save(root / f"{number}_mask.png")
        ref = Image.new("RGB", (2 * SIDE, 2 * SIDE), (0, number, 0))
        ImageDraw.Draw(ref).rectangle([2 * edge for edge in BOX[:2]] + [2 * edge + 1 for edge in BOX[2:]], fill=(0, 0, 50 * number))
        ref.save(root / f"{number}_ref.png")
    (root / "self_bench.txt").write_text("1-Azir\n2-The text is 'Zed'\n3-Paint 'Lux' in gold\n")
    return root


def test_the_target_is_the_ref_and_the_style_its_crop_at_the_mask(folder: Path) -> None:
    task = Tasks(TripletRows(folder, reference="own", target="ref"), resize=None)[1]
    assert task.target is not None
    assert task.reference is not None
    assert task.target.size == task.images[0].size == (SIDE, SIDE)
    assert (task.images[0].getpixel((0, 0)), task.target.getpixel((0, 0))) == ((2, 0, 0), (0, 2, 0))
    assert task.reference.size == (BOX[2] - BOX[0] + 1, BOX[3] - BOX[1] + 1)
    assert task.reference.getpixel((5, 3)) == (0, 0, 100)


def test_the_published_recipes_learn_the_ref_and_the_others_the_source() -> None:
    chosen = {
        name: load(f"flux-fill/{name}", ["data.path=x"]).document()["data"]
        for name in ("ip-adapter-grpo-published", "ip-adapter-nft-published", "ip-adapter-grpo")
    }
    assert {name: (data["target"], data["reference"]) for name, data in chosen.items()} == {
        "ip-adapter-grpo-published": ("ref", "own"),
        "ip-adapter-nft-published": ("ref", "own"),
        "ip-adapter-grpo": ("source", "other"),
    }


def test_a_line_that_is_a_prompt_is_not_put_into_the_template_again(folder: Path) -> None:
    rows = TripletRows(folder, reference="own")
    assert [(rows[index].instruction, rows[index].text) for index in (0, 1)] == [
        ("The text is 'Azir'.", "Azir"),
        ("The text is 'Zed'", "Zed"),
    ]
    (problem,) = rows.problems
    assert (problem.line, problem.severity) == (3, "note")
    assert "1 texts look like prompts (lines 3)" in problem.what
    whole = TripletRows(folder, reference="own", template="{}")
    assert (whole[2].instruction, whole[2].text) == ("Paint 'Lux' in gold", "Lux")
    assert not whole.problems


def test_a_folder_of_ones_own_is_no_test_set(folder: Path) -> None:
    assert find_test_sets([folder, folder / "self_bench.txt"]) == ()
    for number in range(100):
        (folder / f"test{number}_source.png").touch()
    assert [found.name for found in find_test_sets([folder])] == ["Calligrapher's bench"]


def test_latents_of_512_pixels_have_the_shapes_that_the_trainer_prints() -> None:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(
        **blocks, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=16, shift_factor=0.0
    )
    latents = FillLatents(vae)
    picture = Image.new("RGB", (512, 512))
    assert latents.encode(latents.pixels([picture], (512, 512))).shape == (1, 1024, 64)
    # The trainer has one value per latent, (1, 1, 64, 64); FLUX.1-Fill was trained with one per pixel.
    assert latents.pack_mask(latents.mask([picture.convert("L")], (512, 512))).shape == (1, 1024, 256)


class Scores(loopback.Handler):
    """The trainer's server: it scores the red and the green of the first pixel, and answers errors as a list with status 200."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.asked.append(body)
        pixel = Image.open(io.BytesIO(base64.b64decode(body["image"]))).convert("RGB").getpixel((0, 0))
        if pixel == (0, 0, 9):
            return self.reply(200, [{"error": "out of memory"}, 500])
        return self.reply(200, {"vlm_score": pixel[0] / 51, "ocr_confidence": pixel[1] / 255, "combined_score": 0.0})


def test_running_score_servers_score_images_in_turn() -> None:
    first, second = (type("Instance", (Scores,), {"asked": []}) for _ in range(2))
    with loopback.running(loopback.Server(first)) as one, loopback.running(loopback.Server(second)) as other:
        section = retouch.rewards.ScoreServer(endpoints=(one.url, other.url))
        reward = section.build()
        samples = [
            Sample(Task("a", "The text is 'Azir'.", text="Azir"), Image.new("RGB", (4, 4), colour))
            for colour in ((255, 0, 0), (51, 255, 0), (0, 0, 9), (102, 0, 0))
        ]
        found = reward(samples)
        reward.close()
        assert found["vlm_score"].tolist()[:2] == [5.0, 1.0]
        assert found["ocr_confidence"].tolist()[:2] == [0.0, 1.0]
        # An error is a missing score and never a number.
        assert found["vlm_score"].isnan().tolist() == [False, False, True, False]
        assert len(first.asked) == len(second.asked) == 3
        assert {key for body in first.asked for key in body} == {"image", "prompt", "text"}
        assert retouch.score(section, samples[0].image) == {"vlm_score": 5.0, "ocr_confidence": 0.0}
        narrow = retouch.rewards.ScoreServer(endpoints=(one.url,), columns={"vlm_score": (0.0, 1.0)})
        outside = retouch.score(narrow, samples[0].image)["vlm_score"]
        assert outside != outside  # a score outside of its declared range is missing


def test_the_folder_trains_for_two_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_models.save_flux(tmp_path / "fill", fills=True)
    tiny_towers.clip(tmp_path / "siglip", kind="siglip")
    with loopback.running(loopback.Server(Scores)) as server:
        reward = {"kind": "score-server", "endpoints": [server.url], "combine": "0.7 * ocr_confidence + 0.3 * vlm_score"}
        settings = [f"data.path={folder}", f"policy.model.path={tmp_path / 'fill'}", f"policy.train.encoder={tmp_path / 'siglip'}"]
        settings += [f"reward={json.dumps(reward)}", "policy.model.dtype=float32", "policy.model.size=[32,32]", "device=cpu"]
        settings += ["group_size=2", "rollout.chunk=2", "rollout.num_steps=4", 'rollout.window={"mode": "all"}']
        settings += ["ranks=1", "sharding=null", "data.held_out=1", "data.size=[32,32]", "eval.tasks=1", "eval.batch=1"]
        settings += [f"phases.{number}.{change}" for number in (0, 1) for change in ("steps=1", "tasks_per_step=1")]
        command = ["train", "flux-fill/ip-adapter-grpo-published"]
        assert main([*command, *(part for each in settings for part in ("--set", each))]) == 0
