"""Tiny policies of the real classes, and batches, for tests of the code that uses a policy."""

import functools

import torch

import tiny_editing
import tiny_models
from retouch.core.surrogates import loss_weights
from retouch.models.pipeline import Guided
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import (
    AllSteps,
    CPSTransition,
    DenoisingRollout,
    ODETransition,
    RandomWindow,
    SDETransition,
    SlidingWindow,
)
from retouch.types import Minibatch, Task
from retouch_models.sd3.model import SD3
from retouch_worlds.testing.assertions import relative_distance

NUM_STEPS = 4
WINDOWS = {
    "all": AllSteps(),
    "window": RandomWindow(mode="window", size=2, low=0, high=3),
    "sliding": SlidingWindow(size=2, every=1, stride=1),
    "branch": RandomWindow(mode="branch", size=2, low=1, high=3),
}
TRANSITIONS = {
    "sde": SDETransition(kind="sde", noise_level=0.7),
    "cps": CPSTransition(noise_level=0.8),
    "dance": SDETransition(kind="dance", noise_level=0.5),
    "ode": ODETransition(),
}
LORA_TARGETS = ("attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj")


def _frozen(module):
    """Freeze the module as a run does: the tests of a process share these modules, so a test must not leave gradients in them."""
    return module.requires_grad_(False)


@functools.cache
def _qwen_parts():
    encoder = tiny_models.qwen_text_encoder(tiny_models.qwen_tokenizer())
    return {"vae": _frozen(tiny_models.qwen_vae()), "text_encoder": _frozen(encoder)}


def edit_model():
    """Make a Qwen-Image-Edit for images of 16 x 16 px: 4 output tokens and 4 source tokens."""
    own = {"tokenizer": tiny_models.qwen_tokenizer(), "transformer": tiny_models.qwen_transformer()}
    return tiny_editing.editor({**_qwen_parts(), **own})


@functools.cache
def _sd3_parts():
    return {"vae": _frozen(tiny_models.sd3_vae()), "text_encoders": (_frozen(tiny_models.clip(16, 1)), None, None)}


def sd3_model():
    """Make a Stable Diffusion 3 for images of 8 x 16 px, with one text encoder: x is (r, 16, 2, 4)."""
    return SD3(
        **_sd3_parts(),
        # Each model has its own tokenizer: it stores the padding of the last call, and the ranks of a test are threads.
        tokenizers=[tiny_models.clip_tokenizer(), None, None],
        transformer=tiny_models.sd3_transformer(),
        scheduler_config={"shift": 3.0, "num_train_timesteps": 1000},
        size=(8, 16),
        max_sequence_length=2,
    )


MODELS = {"edit": edit_model, "sd3": sd3_model}


make_trainable = functools.partial(tiny_models.make_trainable, targets=LORA_TARGETS)


def sampling(kind="sde", mode="all", **options):
    transition = TRANSITIONS[kind]
    if "noise_level" in options:
        transition = transition.model_copy(update={"noise_level": options.pop("noise_level")})
    return DenoisingRollout(**{"num_steps": NUM_STEPS, "transition": transition, "window": WINDOWS[mode], **options})


def policy(
    family="sd3",
    *,
    train="lora",
    guidance=1.0,
    microbatch=4,
    copies=("reference",),
    keep_means=False,
    acting="current",
    objective=None,
    **how,
):
    """Make a new policy whose weights equal the reference.

    ``objective``: decides which states a rollout stores. ``how``: arguments of ``sampling``.
    """
    model = MODELS[family]()
    make_trainable(model.module, train)
    taught = objective is not None and objective.learns_from_teachers
    return DenoisingPolicy(
        Guided(model, guidance) if guidance > 1 else model,
        sampling=sampling(**how),
        acting=acting,
        eval_steps=NUM_STEPS,
        microbatch=microbatch,
        copies=tiny_models.weight_copies(model.module, copies, train),
        keep_means=keep_means,
        first_gradient_step=None if objective is None or taught else objective.first_gradient_step,
        keep_states=taught,
    )


def trained(policy):
    return {name: parameter for name, parameter in policy.module.named_parameters() if parameter.requires_grad}


def perturb(policy, size=0.05, key=0):
    tiny_models.perturb(policy.module, size, key)


def tasks(count=2, *, with_images=True):
    """Make tasks with instructions of unequal lengths, a source (unless ``with_images`` is false) and a target."""
    texts = ["red", "make it blue", "a", "put it left of that"]
    return tuple(
        Task(
            id=f"t{k}",
            instruction=texts[k % len(texts)],
            images=(tiny_models.image(k, 16, 16),) if with_images else (),
            target=tiny_models.image(100 + k, 16, 16),
        )
        for k in range(count)
    )


def batch(count=2, group_size=2, *, seed=3, step=5, tasks=tasks):
    """Make a batch with a group of ``group_size`` rows per task."""
    return tiny_models.batch(tasks(count), group_size, seed=seed, step=step)


def minibatch(batch, trajectory, advantages, *, valid=None, normalise="sequence", epoch=0):
    """Make the minibatch of one optimizer step; ``advantages``: one per row."""
    valid = torch.ones(len(batch), dtype=torch.bool) if valid is None else valid
    weights = loss_weights(trajectory.mask, valid, normalise=normalise)
    return Minibatch(batch, trajectory, torch.as_tensor(advantages)[:, None].expand_as(weights), weights, epoch)


def gradient(policy, objective, minibatch):
    """Return the gradient of the loss by parameter name, summed over the objective's microbatches, and the losses."""
    parameters = trained(policy)
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    losses = []
    for loss in objective.losses(policy, minibatch):
        losses.append(loss)
        if loss.value.requires_grad:
            found = torch.autograd.grad(loss.value, list(parameters.values()), allow_unused=True)
            for name, part in zip(parameters, found, strict=True):
                total[name] += torch.zeros_like(total[name]) if part is None else part
    return total, losses


def distance(a, b):
    """Return |a - b| / |b| of two gradients, each a mapping by parameter name."""
    assert a.keys() == b.keys()
    return relative_distance([a[name] for name in b], list(b.values()))
