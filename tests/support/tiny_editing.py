"""Tiny image editors conditioned on responses, the diffusers pipelines to compare with, and policies that generate responses."""

import functools

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import tiny_models
import tiny_writers
import tiny_writing
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_models.qwen_image.responses import QwenResponses, ResponseEncoder, writer_for


def parts(dtype=torch.float32):
    tokenizer = tiny_models.qwen_tokenizer()
    models = {
        "transformer": tiny_models.qwen_transformer(),
        "vae": tiny_models.qwen_vae(),
        "text_encoder": tiny_models.qwen_text_encoder(tokenizer),
    }
    if dtype != torch.float32:
        models = {name: model.to(dtype) for name, model in models.items()}
    return {**models, "tokenizer": tokenizer}


def editor(made, cls=QwenImageEdit, **options):
    template = tiny_models.TEMPLATE if cls is QwenImageEdit else tiny_models.TEXT_TEMPLATE
    options = {"template": template, "condition_area": "as_is", "source_area": "as_is", **options}
    return cls(**made, image_processor=tiny_models.qwen_image_processor(), scheduler_config=tiny_models.SCHEDULER, **options)


def pipeline(cls, made, template, *, pass_token_types=tiny_models.pass_token_types):
    """Make the diffusers pipeline with the same weights."""
    pipe = cls(
        **{**made, "text_encoder": pass_token_types(made["text_encoder"])},
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
        processor=tiny_models.ImageProcessorOnly(image_processor=tiny_models.qwen_image_processor(), tokenizer=made["tokenizer"]),
    )
    pipe.prompt_template_encode = template
    before = template.partition("<|vision_start|>")[0].partition("{}")[0]
    pipe.prompt_template_encode_start_idx = len(made["tokenizer"](before).input_ids)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def policy(editor, *, longest=6):
    """Make a policy that generates responses for the editor; its LoRA is not zero, and its weight copies include the reference."""
    module = tiny_writers.module()
    tiny_writers.make_trainable(module, "lora")
    writer = writer_for(editor, module, stop=tiny_writing.STOPS)
    made = tiny_writing.policy(writer=writer, sampling={"max_new_tokens": longest})
    tiny_writers.perturb(module)
    return made


def policy_encoder(policy):
    return ResponseEncoder(policy.model.module, functools.partial(policy.copies.using, "reference"))


def tasks():
    """Make two tasks with images of the same size and a third with another size; the instructions have different lengths."""
    return (
        tiny_models.task("a", "make it red", tiny_models.image(0, 48, 48)),
        tiny_models.task("b", "blue", tiny_models.image(1, 48, 48)),
        tiny_models.task("c", "turn it round and round", tiny_models.image(2, 32, 48)),
    )


batch = functools.partial(tiny_models.batch, first=7)


def tasks_and_rollout(policy, made):
    """Return the task of each row and a rollout: the arguments of a renderer."""
    return [made.tasks[k] for k in made.group], policy.rollout(made)


def responses(made, encoder=None):
    return QwenResponses(made, ResponseEncoder.frozen(made.text.encoder) if encoder is None else encoder)
