"""`retouch playground build --text-to-image`: trains the playground's text-to-image model, and the base prompt enhancer for it,
from a seed."""

from dataclasses import replace
from pathlib import Path

import torch

from retouch.models.qwen_image.model import QwenImage, QwenImageEdit
from retouch.models.qwen_vl.model import QwenWriter
from retouch.policies.autoregressive.demonstrations import has_completion
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.records import files
from retouch.renderers.prompts import PromptRenderer
from retouch.run.evaluation import score_table
from retouch_worlds.data.text_to_image import TextToImageData
from retouch_worlds.models.family import PlaygroundModel, PlaygroundTextToImage
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.build_editor import PARTS
from retouch_worlds.pretraining.networks import qwen_parts
from retouch_worlds.pretraining.networks.enhancer import LONGEST, EnhancerTraining, train_enhancer
from retouch_worlds.pretraining.networks.enhancer import TEMPLATE as ENHANCING
from retouch_worlds.pretraining.networks.text_to_image import TEMPLATE, TextToImageTraining, train_text_to_image
from retouch_worlds.pretraining.record import BuildRecord, halved, held_out, log, one_thread, write_index
from retouch_worlds.rewards.scene_judge import SceneReward

TEXT_TO_IMAGE = TextToImageTraining(steps=2600)
ENHANCER = EnhancerTraining(steps=1500)
COMMAND = "retouch playground build --text-to-image"
HELD_OUT = 320
EVAL_STEPS = 6


def build_text_to_image(
    out: Path | None, *, seed: int, text_to_image: TextToImageTraining = TEXT_TO_IMAGE, enhancer: EnhancerTraining = ENHANCER
) -> dict[str, float]:
    """Train both models and write them to ``out``/text_to_image and ``out``/enhancer (None: into the package). Returns the means.

    It takes about half an hour on one core of a laptop. It uses one thread, so that the bits do not depend on the number of cores.
    """
    record = BuildRecord(seed=seed, command=COMMAND)
    folders = [playground_weights(name) if out is None else out / name for name in ("text_to_image", "enhancer")]
    with one_thread():
        editor = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
        assert isinstance(editor, QwenImageEdit)
        model = train_text_to_image(editor, replace(text_to_image, seed=seed), log.info)
        writer = train_enhancer(replace(enhancer, seed=seed), log.info)
    write_text_to_image(model, folders[0])
    write_enhancer(writer, folders[1])
    scores = measure(model, writer)
    record.finish(scores, *folders)
    return scores


def write_text_to_image(model: QwenImage, folder: Path) -> None:
    """Write the text-to-image model in diffusers' layout, in half precision, and its settings as ``adapter.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    halved(model.module).save_pretrained(folder / "transformer")
    halved(model.latents.vae).save_pretrained(folder / "vae")
    halved(model.text.encoder).save_pretrained(folder / "text_encoder")
    model.text.tokenizer.save_pretrained(folder / "tokenizer")
    qwen_parts.scheduler().save_pretrained(folder / "scheduler")
    write_index(folder, "QwenImagePipeline", {name: found for name, found in PARTS.items() if name != "processor"})
    files.write_json(folder / "adapter.json", {"template": TEMPLATE, "size": list(model.size)})
    for part in ("transformer", "vae"):
        _remove_path(folder / part / "config.json")


def write_enhancer(writer: QwenWriter, folder: Path) -> None:
    """Write the enhancer in transformers' layout, in half precision, and its template as ``adapter.json``."""
    halved(writer.module).save_pretrained(folder)
    writer.template.tokenizer.save_pretrained(folder)
    qwen_parts.image_processor().save_pretrained(folder)
    files.write_json(folder / "adapter.json", {"template": ENHANCING})


def _remove_path(config: Path) -> None:
    """Remove the local path of the weights from a configuration."""
    files.write_json(config, {key: value for key, value in files.read_json(config).items() if key != "_name_or_path"})


def measure(model: QwenImage, writer: QwenWriter) -> dict[str, float]:
    """Held-out means of images from the correct prompts, and of images from the greedy completions of the enhancer."""
    policy = AutoregressivePolicy(
        writer, sampling=TokenRollout(max_new_tokens=LONGEST), microbatch=HELD_OUT, copies=WeightCopies(writer.module)
    )
    renderer = PromptRenderer(model=PlaygroundTextToImage(), num_steps=EVAL_STEPS, batch=HELD_OUT)
    right, enhanced = held_out(
        policy,
        tasks=TextToImageData(seed=1, count=HELD_OUT, complexity=[1, 2, 3, 4], split="test").tasks(in_turn=True),
        renderer=renderer.build(model, writer),
        reward=SceneReward(),
        column="overall",
        demonstrates=has_completion,
    )
    found: dict[str, float] = {}
    for words, evaluated in (("right words", right), ("enhancer", enhanced)):
        for row, means in score_table(evaluated)[0].items():
            found |= {f"{words}, {row} {name}": float(means[name]) for name in ("overall", "alignment", "quality", "exact")}
    return found
