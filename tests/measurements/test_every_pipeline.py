import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "measurements" / "pipelines"))
import every_pipeline as tiny

from slow_params import slow_except

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
QUICK = ("StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxKontextPipeline", "SanaPipeline", "Kandinsky5I2IPipeline")
"""One of each sort: U-Net, transformer, editing, linear attention, frames."""


@pytest.mark.parametrize("name", slow_except(QUICK, tiny.PIPELINES))
def test_a_prompt_and_a_source_are_all_that_a_tiny_pipeline_needs_and_both_reach_the_image(name):
    pipeline, call = tiny.PIPELINES[name]()

    def made(prompt, output, source=0):
        photo = tiny.photo(64, source)
        argument = tiny.SOURCES.get(name)
        sources = {argument: [photo] if argument == "images" else photo} if argument else {}
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 2, "generator": generator, "output_type": output, "return_dict": False}
        return np.asarray(pipeline(prompt=prompt, **options, **sources, **call)[0][0], dtype=float)

    assert type(pipeline).__name__ == name.split(":")[0]
    assert not any(part.training for part in pipeline.components.values() if isinstance(part, torch.nn.Module))
    image = made("red cube", "pil")
    assert image.shape[0] >= 32
    assert image.std() > 1  # NaN is black
    latent = made("red cube", "latent")
    assert abs(latent - made("a blue cat", "latent")).max() > 1e-4
    if name in tiny.SOURCES:
        assert abs(latent - made("red cube", "latent", source=1)).max() > 1e-4


def test_every_image_pipeline_of_diffusers_has_a_builder_or_a_reason():
    built = {name.split(":")[0] for name in tiny.PIPELINES}
    assert [name for name in tiny.image_pipelines() if name not in built and not tiny.why_not(name)] == []
    assert not built & set(tiny.REFUSED)
    assert len(built) >= 34
    assert tiny.SOURCES.keys() <= tiny.PIPELINES.keys()
