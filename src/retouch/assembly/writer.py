"""A writer and the renderer behind it, from what a recipe says of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.assembly.emu3 import build_emu3
from retouch.assembly.model import DTYPES
from retouch.config.imports import build_class
from retouch.models.base import ImportedModel
from retouch.models.common.chat_template import TURNS
from retouch.models.common.encoder import Encoder
from retouch.models.common.pipeline_model import accepts_prompt
from retouch.models.common.pretrained import fetch_writer
from retouch.models.qwen_image.edit import QwenImageEdit
from retouch.models.qwen_image.responses import QwenResponses, writer_for
from retouch.models.qwen_vl.load import load_writer
from retouch.models.qwen_vl.model import QwenWriter
from retouch.playground.models import playground_weights
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
from retouch.recipe import renderer as recipe_renderer
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.writer import AutoregressivePolicy, PlaygroundEnhancer, PlaygroundWriter
from retouch.records.files import read_json
from retouch.renderers.answers import enhancer_prompt
from retouch.renderers.blind import Blind
from retouch.renderers.codes import CodesModel, CodesRenderer
from retouch.renderers.prompts import FlowPainter, PromptRenderer
from retouch.renderers.responses import ResponseRenderer
from retouch.types import Task


def playground_writer_weights() -> Path:
    """The base writer that ships with the package."""
    return Path(str(files("retouch.playground"))) / "weights" / "writer"


def build_writer(policy: AutoregressivePolicy, *, before: DenoisingModel | None, device: torch.device) -> AutoregressiveModel:
    """Load the writer, all of it frozen. ``before``: the editor that reads its responses, whose template and pictures it takes.

    ValueError where the editor has other tokens.
    """
    section = policy.model
    if isinstance(section, ImportedModel):
        made: AutoregressiveModel = build_class(section.class_, section.args, device=device)
        return made
    if isinstance(section, TokenModel):
        tokens: Any = build_emu3(section, device=device, gradient_checkpointing=policy.gradient_checkpointing)
        drawing: AutoregressiveModel = tokens
        return drawing
    system = area = None
    if isinstance(section, PlaygroundEnhancer):
        enhancer: AutoregressiveModel = _enhancer(section, device=device, gradient_checkpointing=policy.gradient_checkpointing)
        return enhancer
    if isinstance(section, PlaygroundWriter):
        path = Path(section.path) if section.path else playground_writer_weights()
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no playground writer; `retouch playground build --writer` makes it")
    else:
        path, system, area = fetch_writer(section.path), section.system, section.area
    writer: Any = load_writer(
        path,
        template=TURNS.format(system=enhancer_prompt() if system is None else system, user="{}"),
        dtype=DTYPES[section.dtype],
        device=device,
        attention=section.attention,
        area="as_is" if area is None else area,
        gradient_checkpointing=policy.gradient_checkpointing,
    )
    if before is not None:
        writer = _in_front_of(before, writer)
    checked: AutoregressiveModel = writer
    return checked


def _enhancer(section: PlaygroundEnhancer, *, device: torch.device, gradient_checkpointing: bool) -> Any:
    """The base enhancer with the template that its folder states."""
    path = Path(section.path) if section.path else playground_weights("enhancer")
    if not (path / "adapter.json").is_file():
        raise ValueError(f"{path} holds no playground enhancer; `retouch playground build --painter` makes it")
    return load_writer(
        path,
        template=read_json(path / "adapter.json")["template"],
        dtype=DTYPES[section.dtype],
        device=device,
        attention=section.attention,
        gradient_checkpointing=gradient_checkpointing,
    )


def _in_front_of(editor: DenoisingModel, writer: QwenWriter) -> QwenWriter:
    assert isinstance(editor, QwenImageEdit), "the recipe's checks see to it"
    if writer.template.tokenizer.get_vocab() != editor.text.tokenizer.get_vocab():
        raise ValueError("policy.model: its tokenizer is another than that of the editor, which could not read its ids")
    module: Any = writer.module
    return writer_for(editor, module, gradient_checkpointing=writer.gradient_checkpointing)


def build_renderer(
    section: recipe_renderer.Renderer,
    image_model: DenoisingModel | AutoregressiveModel,
    *,
    writer: AutoregressiveModel,
    copies: WeightCopies,
    num_steps: int | None = None,
    in_step: bool = False,
) -> Renderer:
    """What makes pictures of what ``writer`` wrote, in ``num_steps`` steps (None: as the section says). The image model is frozen.
    ``in_step``: ranks must call the writer equally often.

    ValueError where the writer's states are not those that the editor reads.
    """
    if isinstance(section, recipe_renderer.CodesRenderer):
        if not isinstance(image_model, CodesModel):
            raise ValueError(f"renderer.kind: codes needs a model that decodes them, which {type(image_model).__name__} does not")
        return CodesRenderer(image_model, rows=section.batch)
    assert isinstance(image_model, DenoisingModel)
    steps = section.num_steps if num_steps is None else num_steps
    if isinstance(section, recipe_renderer.ResponseRenderer):
        assert isinstance(image_model, QwenImageEdit), "the recipe's checks see to it"
        editor: Any = QwenResponses(image_model, _encoder(section, image_model, writer=writer, copies=copies))
        responses = ResponseRenderer(
            editor,
            num_steps=steps,
            cut_off=section.cut_off,
            guidance_scale=section.guidance_scale,
            shared_noise=section.shared_noise,
            encoder_rows=section.encoder_batch,
            rows=section.batch,
            sharded=in_step and image_model.text.encoder is writer.module,
        )
        return Blind(responses) if section.blind else responses
    reads = partial(accepts_prompt, image_model)
    prompts = PromptRenderer(
        FlowPainter(image_model, num_steps=steps, guidance_scale=section.guidance_scale, reads=reads),
        cut_off=section.cut_off,
        shared_noise=section.shared_noise,
        rows=section.batch,
    )
    return Blind(prompts) if section.blind else prompts


def _encoder(
    section: recipe_renderer.ResponseRenderer, editor: QwenImageEdit, *, writer: AutoregressiveModel, copies: WeightCopies
) -> Encoder:
    module = writer.module
    if section.encoder == "frozen" and editor.text.encoder is not module:
        return Encoder.frozen(editor.text.encoder)
    transformer: Any = editor.module
    width = transformer.config.joint_attention_dim
    if not isinstance(module, Qwen2_5_VLForConditionalGeneration):
        raise ValueError(f"renderer.encoder: the editor reads states of a Qwen2.5-VL, not of {type(module).__name__}; take frozen")
    if module.get_input_embeddings().weight.shape[1] != width:
        raise ValueError(f"renderer.encoder: the editor reads states of width {width}, and the writer has others; take frozen")
    published: Callable[[], AbstractContextManager[None]] = nullcontext
    if section.guidance_scale > 1 or section.encoder == "frozen":
        assert "reference" in copies.copies, "the negative branch is read under weights that do not train, and a frozen one all"
        published = partial(copies.using, "reference")
    if section.encoder == "frozen":
        return Encoder.below(module, published=published)
    return Encoder.policy(module, published=published)


class Averaged:
    """A renderer that computes with the averaged weights of the policy that it reads with."""

    def __init__(self, renderer: Renderer, copies: WeightCopies) -> None:
        self.renderer = renderer
        self.copies = copies

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        with self.copies.using("average"):
            return self.renderer(tasks, trajectory)
