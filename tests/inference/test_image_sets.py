"""``retouch tools fid``: distances of folders of images equal those of the same images in memory."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny_towers
from retouch.cli.parser import main
from retouch_bench.image_sets import ImageFiles, distances_of_folders
from retouch_rewards.dino import dinov2_features, distance_of_sets
from retouch_rewards.measures import kernel_distance


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders ``one`` with 20 images (more than DINOv2 encodes at once) and ``other`` with 3, and a DINOv2 model."""
    root = tmp_path_factory.mktemp("sets")
    tiny_towers.dino(root / "dino")
    for name, count in (("one", 20), ("other", 3)):
        (root / name / "below").mkdir(parents=True)
        values = np.random.default_rng(count).integers(0, 256, (count, 30, 40, 3), dtype=np.uint8)
        for number, value in enumerate(values):
            Image.fromarray(value).save(root / name / ("below" if number % 2 else ".") / f"{number:02}.PNG", format="PNG")
    (root / "one" / "notes.txt").write_text("not an image")
    return root


def test_the_command_prints_the_distance_of_the_images_in_both_folders(folders, capsys):
    words = ["tools", "fid", str(folders / "one"), str(folders / "other"), "--dinov2", str(folders / "dino")]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    sets = [[image.copy() for image in ImageFiles(folders / name)] for name in ("one", "other")]
    frechet = distance_of_sets(*sets, path=str(folders / "dino"))
    kernel = kernel_distance(*dinov2_features(*sets, path=str(folders / "dino")))
    expected = {"frechet": pytest.approx(frechet, rel=1e-6), "kernel": pytest.approx(kernel, rel=1e-6)}
    assert printed == {"features": "DINOv2", "images": 20, "references": 3, **expected}
    assert frechet > 0
    assert main(words) == 0
    text = f"FD-DINOv2 {frechet:.3f}, KD-DINOv2 {kernel:.5f}, 20 images against 3 references\nFewer than 2048 images: FD-DINOv2 is"
    assert text in capsys.readouterr().out


def test_folders_without_images_and_other_numbers_of_networks_are_refused(folders, capsys):
    assert main(["tools", "fid", str(folders / "one"), str(folders / "other"), "--inception", str(folders / "no.safetensors")]) == 2
    assert "no.safetensors is not a safetensors file; FID needs one" in capsys.readouterr().err
    inception = {"inception": folders / "none.safetensors"}
    for images, networks, message in (
        ("missing", inception, "missing is not a folder"),
        ("dino", inception, "dino has 0 PNG, JPEG or WebP images; a distance of sets needs at least two"),
        ("one", {}, "give the weights of one network"),
        ("one", {"inception": Path("a"), "dinov2": "b"}, "give the weights of one network"),
    ):
        with pytest.raises(ValueError, match=message):
            distances_of_folders(folders / images, folders / "other", **networks)
