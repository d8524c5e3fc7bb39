"""The recipes that are measured, at full size or tiny, with random weights that are drawn on the device.

A case is a shipped recipe with a few changed settings and changed model configurations. Its models are the real classes, built
from the published configurations; nothing is read from a disk or a network.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from target import StageClock, Target
from torch import nn

from retouch.distributed.optimizer import Stepper
from retouch.distributed.ranks import Ranks, plan_placement, set_numerics
from retouch.models.base import packaged_config
from retouch.recipe.recipe import Recipe, load
from retouch.run.build import Assembly, connect
from retouch.run.step import Phase, Run
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_plan.dry_run import made_up_judge, made_up_sets, scores
from retouch_plan.models import vision_part, without_weights, write_folder, write_single

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STD = 0.02
"""Standard deviation of the random weights."""
TINY_AREA = 64 * 64
Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe with settings (as for ``--set``) and, for each part of its model, changes of the configuration.

    A dry run applies ``tiny`` and ``tiny_settings`` in addition to ``changes`` and ``settings``. ``tiny_encoder``: the changes of
    the image encoder of an IP-Adapter in a dry run.
    """

    recipe: str
    settings: Sequence[str]
    changes: Changes
    tiny: Changes
    tiny_settings: Sequence[str]
    tiny_encoder: Changes = field(default_factory=dict)

    def load(self, folder: Path, *, tiny: bool, settings: Sequence[str] = ()) -> Recipe:
        """Load the recipe, as ``write`` changes it."""
        return load(*self.write(folder, tiny=tiny, settings=settings))

    def write(self, folder: Path, *, tiny: bool, settings: Sequence[str] = ()) -> tuple[str, list[str]]:
        """Write the model's folder, which has only configurations, below ``folder``. Returns the recipe's path and settings."""
        source = str(RECIPES / self.recipe)
        chosen = [*self.settings, *settings, *(self.tiny_settings if tiny else ())]
        policy: Any = load(source, chosen).policy
        described = policy.model.published()
        for changes in (self.changes, self.tiny if tiny else {}):
            described = _merged(described, changes)
        paths = [f"policy.model.path={write_folder(folder / 'configurations', described)}"]
        if (encoder := getattr(policy.train, "encoder", None)) is not None:
            vision = _merged(vision_part(packaged_config("encoders", encoder) or {}), {"config": self.tiny_encoder if tiny else {}})
            paths.append(f"policy.train.encoder={write_single(folder / 'encoder', vision)}")
        return source, [*chosen, *paths]


_TINY_CLIP = {"hidden_size": 32, "projection_dim": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_ONE_LAYER = {"config": {"num_hidden_layers": 1}}
SD3 = Case(
    recipe="sd3/ocr-grpo.jsonnet",
    # One rollout chunk of the recipe, and one optimizer step for all rows.
    settings=("ranks=1", "tasks_per_step=1", "group_size=9", "minibatches=1"),
    changes={},
    tiny={
        "transformer": {
            "config": {
                **{"sample_size": 8, "pos_embed_max_size": 8, "num_layers": 2, "num_attention_heads": 2},
                **{"attention_head_dim": 32, "joint_attention_dim": 64, "caption_projection_dim": 64, "pooled_projection_dim": 64},
                "dual_attention_layers": [0],
            }
        },
        "text_encoder": {"config": _TINY_CLIP},
        "text_encoder_2": {"config": _TINY_CLIP},
        "text_encoder_3": {"config": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}},
        "vae": {"config": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}},
    },
    tiny_settings=("policy.model.size=[64,64]", "rollout.num_steps=3", "group_size=2", "microbatch=2", "rollout.chunk=2"),
)
LEARNS = replace(
    SD3,
    recipe="sd3/one-gpu.jsonnet",
    # With the same initial noise in a group, its images differ only by the noise of the steps that train. A step of AdamW changes
    # the output of a layer in proportion to its width, which is 1536 at full size and 64 in a dry run.
    settings=(
        *("card=80gb", "policy.model.size=[128,128]", "steps=20", "tasks_per_step=2", "group_size=16", "minibatches=1"),
        *("microbatch=32", "rollout.num_steps=3", 'rollout.window={"mode":"all"}', "rollout.shared_noise=true", "rollout.chunk=32"),
        *('reward={"kind":"appearance","combine":{"brightness":1}}', "eval.tasks=2", "eval.num_steps=3", "samples.tasks=1"),
        *("policy.ema=null", "checkpoints.every=10", "learning_rate=2e-4", "objective.clip_low=1e-3", "objective.clip_high=1e-3"),
        *("policy.train.rank=4", "policy.train.alpha=8", "policy.gradient_checkpointing=false"),
        'rollout.transition={"kind":"cps","noise_level":0.8}',
    ),
    changes={"text_encoder": _ONE_LAYER, "text_encoder_2": _ONE_LAYER, "text_encoder_3": {"config": {"num_layers": 1}}},
    tiny_settings=("policy.model.size=[64,64]", "learning_rate=5e-3"),
)
"""Stable Diffusion 3.5 Medium with text encoders of one layer: 20 steps, each of which makes 32 small images."""
SD3_SHORT = replace(
    SD3,
    changes={
        "transformer": {"config": {"num_layers": 4, "dual_attention_layers": [0, 1]}},
        "text_encoder": _ONE_LAYER,
        "text_encoder_2": _ONE_LAYER,
        "text_encoder_3": {"config": {"num_layers": 1}},
    },
)
"""Stable Diffusion 3.5 Medium with four transformer blocks, and text encoders of one layer."""
_QWEN_ENCODER = {"text_config": {"num_hidden_layers": 1}, "vision_config": {"depth": 1, "fullatt_block_indexes": [0]}}
QWEN = Case(
    recipe="qwen-image-edit/flow-grpo.jsonnet",
    # One chunk of four images, with three denoising steps, of which one trains.
    settings=(
        *("ranks=1", "tasks_per_step=1", "group_size=4", "minibatches=1", "rollout.num_steps=3"),
        *("rollout.window.size=1", "rollout.window.high=2", "policy.compile=null"),  # compiling takes minutes
    ),
    changes={"text_encoder": {"config": _QWEN_ENCODER}},  # the full encoder is frozen, and a third as large as the transformer
    tiny={
        "transformer": {"config": {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 256}},
        "text_encoder": {
            "config": {
                "text_config": {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
                "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256},
            }
        },
        "vae": {"config": {"base_dim": 8, "num_res_blocks": 1}},
    },
    tiny_settings=("policy.model.size=[64,64]", "group_size=2", "rollout.chunk=2"),
)
QWEN_SHORT = replace(
    QWEN,
    settings=("ranks=1", "tasks_per_step=1", "group_size=4", "minibatches=1", "policy.compile=null"),
    changes={**QWEN.changes, "transformer": {"config": {"num_layers": 4}}},
    tiny_settings=(*QWEN.tiny_settings, "rollout.num_steps=4", "rollout.window.high=3"),
)
"""Qwen-Image-Edit with four transformer blocks, and with the number of denoising steps of the recipe."""
QWEN_IMAGE = Case(
    recipe="qwen-image/one-gpu.jsonnet",
    # The settings that verl-omni publishes for Qwen-Image, on one of the 32 groups of a step: the two optimizer steps of the step
    # learn from 8 images each instead of 256. The recipe has the 10 steps, of which 2 of the first 5 are stochastic.
    settings=(
        *("card=80gb", "steps=1", "tasks_per_step=1", "group_size=16", "minibatches=2", "microbatch=16", "eval.tasks=1"),
        *("policy.train.rank=64", "policy.train.alpha=128", "policy.ema=null", "rollout.guidance_scale=4", "rollout.chunk=16"),
        *("rollout.transition.noise_level=1.2", "objective.clip_low=1e-5", "objective.clip_high=1e-5"),
    ),
    changes=QWEN.changes,  # encoding a step's prompts with all layers is a ten-thousandth of its work
    tiny=QWEN.tiny,
    tiny_settings=("policy.model.size=[64,64]", "group_size=4", "microbatch=4", "rollout.chunk=4"),
)
QWEN_IMAGE_384 = replace(QWEN_IMAGE, settings=(*QWEN_IMAGE.settings, "policy.model.size=[384,384]"))
QWEN_IMAGE_2 = Case(
    recipe="qwen-image-2/flow-grpo.jsonnet",
    # The settings that Miles-Diffusion publishes for Qwen-Image-2.1 on one GPU, on half of one of the 16 groups of a step. Rank,
    # noise level and the sizes of batches are not known; they are the recipe's, or those of QWEN_IMAGE.
    settings=(
        *("ranks=1", "steps=1", "tasks_per_step=1", "group_size=8", "minibatches=1", "microbatch=16", "rollout.chunk=8"),
        *("policy.model.size=[512,512]", "rollout.window.low=2", "rollout.window.high=4", "eval.tasks=1"),
        'data={"kind":"prompts","path":"recipes/words.txt"}',
        'reward={"kind":"ocr","where":"picture","combine":{"correctness":1}}',  # the recipe's needs a source image
    ),
    changes={"text_encoder": {"config": {"text_config": {"num_hidden_layers": 1}}}},
    tiny={
        "transformer": {"config": {"num_layers": 2, "num_attention_heads": 2, "context_in_dim": 128}},
        "text_encoder": {
            "config": {
                "text_config": {
                    **{"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
                },
                "vision_config": {"depth": 9, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128},
            }
        },
        "vae": {"config": {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}},
    },
    tiny_settings=("policy.model.size=[64,64]", "group_size=2", "microbatch=4", "rollout.chunk=2"),
)
FLUX_FILL = Case(
    recipe="flux-fill/ip-adapter-grpo.jsonnet",
    # The trial step of RL on one GPU. The optimizer is not sharded, so only the double blocks have an adapter.
    settings=("ranks=1", "tasks_per_step=1", "sharding=null", "policy.prompt_embeddings=live", "policy.train.blocks=double"),
    changes={"text_encoder_2": {"config": {"num_layers": 1}}},  # the full encoder is frozen, and lies in CPU memory
    tiny={
        "transformer": {
            "config": {
                **{"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32},
                **{"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": [8, 12, 12]},
            }
        },
        "text_encoder": {"config": _TINY_CLIP},
        "text_encoder_2": {"config": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}},
        "vae": {"config": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}},
    },
    tiny_settings=("policy.model.size=[64,64]", "rollout.num_steps=4", "group_size=2", "rollout.chunk=2"),
    tiny_encoder={
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},
    },
)
"""FLUX.1-Fill with its IP-Adapter; phase 1 is RL."""


@dataclass(frozen=True)
class Built:
    """The parts of a run, ready for steps of a phase. ``clock`` measures the stages of these steps."""

    recipe: Recipe
    parts: Assembly
    stepper: Stepper
    run: Run
    phase: Phase
    clock: StageClock


def build(case: Case, target: Target, settings: Sequence[str] = (), *, phase: int = 0) -> Built:
    """Build the run of a case with random weights on the device, for steps of its phase with this number. Its judge returns made-up
    scores immediately."""
    recipe = case.load(target.scratch, tiny=target.tiny, settings=settings)
    set_numerics(recipe)
    ranks = Ranks(device=target.device)
    with random_weights(target):
        parts = connect(recipe, ranks, placement=plan_placement(recipe, ranks), judge=made_up_judge(), sets=made_up_sets(recipe))
    parts.begin(phase)
    stepper, clock = parts.stepper(), StageClock(target)
    run, chosen = parts.phase(phase, stepper=stepper, judge=scores)
    return Built(recipe, parts, stepper, replace(run, clock=clock), chosen, clock)


def write_writer(folder: Path, described: Mapping[str, Any]) -> Path:
    """Write the configuration ``described`` of a language model into a folder below ``folder``, and return that folder."""
    return write_single(folder / "writer", described)


@contextmanager
def random_weights(target: Target, *, std: float | None = STD) -> Iterator[None]:
    """Build models from configurations with random weights on the device, inside this context; ``std`` as for ``fill``.

    In a dry run, Qwen-Image-Edit also resizes its source images to `TINY_AREA`.
    """
    with ExitStack() as stack:
        stack.enter_context(without_weights(target.device, on_module=lambda name, module: fill(module, std)))
        if target.tiny:
            for name in ("CONDITION_AREA", "SOURCE_AREA"):
                stack.enter_context(patch.object(QwenImageEdit, name, TINY_AREA))
        yield


@torch.no_grad()
def fill(module: nn.Module, std: float | None = STD) -> None:
    """Draw the weights: matrices and kernels from a normal distribution; scales are 1 and biases 0. A ``std`` of None is that with
    which every layer keeps the size of its inputs, so that a narrow model has gradients of the size of a wide one's."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.numel() > max(parameter.shape, default=1):
            parameter.normal_(std=parameter[0].numel() ** -0.5 if std is None else std)
        else:
            parameter.fill_(float(not name.endswith("bias")))


def _merged(described: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    made = dict(described)
    for name, change in changes.items():
        made[name] = _merged(made.get(name, {}), change) if isinstance(change, Mapping) else change
    return made
