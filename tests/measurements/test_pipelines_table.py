"""docs/models.md: its rows are what the pipelines of the installed diffusers give, and no image pipeline is missing."""

import sys
from pathlib import Path

import pytest

import retouch
from slow_params import slow_except

sys.path.insert(0, str(Path(__file__).parents[2] / "measurements"))
sys.path.insert(0, str(Path(__file__).parents[2] / "measurements" / "pipelines"))
import every_pipeline as tiny
from pipelines import table

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
PAGE = table.PAGE.read_text(encoding="utf-8")
FAST = ["Lumina2Pipeline"]


@pytest.mark.parametrize("name", slow_except(FAST, tiny.PIPELINES))
def test_the_row_of_a_class_is_that_of_the_page(name):
    row = table.row(name)
    assert row in PAGE
    assert name not in FAST or "| yes | < 1e-05 | < 1e-05 | < 1e-06 | 100% | yes | diffusers |" in row


def test_every_image_pipeline_of_the_installed_diffusers_is_on_the_page():
    assert [name for name in tiny.image_pipelines() if f"`{name}`" not in PAGE] == []
    assert table.refused() in PAGE


def test_a_check_prints_what_it_found_and_leaves_no_adapter(capsys):
    pipe, call = tiny.PIPELINES["StableDiffusionXLPipeline"]()
    before = {name: (parameter.requires_grad, parameter.clone()) for name, parameter in pipe.unet.named_parameters()}
    retouch.testing.check_pipeline(pipe, call=call)
    assert "LoRA tensors with a gradient        100%" in capsys.readouterr().out
    after = dict(pipe.unet.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name].requires_grad == flag and after[name].equal(value) for name, (flag, value) in before.items())


def test_a_check_refuses_a_guider_with_momentum():
    pipe, call = tiny.PIPELINES["HunyuanImagePipeline:guider"]()
    with pytest.raises(AssertionError, match=r"velocities in another order .* keeps something from step to step"):
        retouch.testing.check_pipeline(pipe, call=call)
