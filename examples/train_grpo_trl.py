r"""TRL's GRPOTrainer in front of a frozen Qwen-Image-Edit: TRL trains the writer, Retouch renders and scores its completions.

On the playground, with its writer, editor and exact judge, on a CPU:

    python examples/train_grpo_trl.py --output_dir runs/trl --max_steps 20 --learning_rate 1e-3 --num_generations 8 \
        --per_device_train_batch_size 32 --max_completion_length 32 --use_peft --lora_r 32 --lora_alpha 64 --bf16 false

At full size, on 8 GPUs with DeepSpeed's ZeRO-2 (without the configuration: DDP), with a judge behind an OpenAI-compatible API:

    accelerate launch --config_file recipes/accelerate/zero2.yaml --num_processes 8 examples/train_grpo_trl.py \
        --output_dir runs/trl --bf16 --dtype bfloat16 \
        --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --editor Qwen/Qwen-Image-Edit --photos DIR --judge gpt-4o --num_steps 20 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 8 --num_train_epochs 3 \
        --learning_rate 1e-5 --use_peft --lora_r 32 --lora_alpha 64 --save_steps 500 --eval_strategy steps --eval_steps 100

With TRL's `--eval_strategy`, a share of the source images is held out, and TRL evaluates on it. Instead of photos:
`--complex_edit UCSC-VLAA/Complex-Edit --complexity 8 --allow_test_sets true`. Complex-Edit has only test splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peft import get_peft_model
from torch.utils.data import ConcatDataset
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from retouch.data.base import DataContext, DataSets, ImageData
from retouch.data.rows import RowRequirements
from retouch.data.sources.folder import FolderData
from retouch.integrations.trl import RetouchReward, dataset_of, processor_for
from retouch.models.kinds import IMAGE_MODELS
from retouch.protocols import Reward
from retouch_bench.complex_edit import ComplexEditData
from retouch_judge.kinds import Endpoint
from retouch_judge.rewards import AspectsReward
from retouch_models.language import QwenLanguageModel
from retouch_models.responses import ResponseRenderer
from retouch_worlds.data import IndirectPlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.models.language import PlaygroundWriter
from retouch_worlds.rewards import PlaygroundReward


@dataclass
class ScriptArguments:
    """Arguments for rendering and scoring responses. The arguments for training the writer are those of TRL."""

    editor: str | None = field(default=None, metadata={"help": "Folder or id of the editor; the playground's editor by default."})
    editor_kind: Literal["qwen-image-edit", "qwen-image-edit-plus"] = "qwen-image-edit"
    photos: str | None = field(default=None, metadata={"help": "Folder with metadata.jsonl; playground tasks by default."})
    complex_edit: str | None = field(default=None, metadata={"help": "Folder or id of Complex-Edit, instead of photos."})
    complexity: str = field(default="8", metadata={"help": "Complex-Edit's edits in one instruction: 8, 1-8 or 1,3,5."})
    complex_edit_split: Literal["test_real", "test_syn"] = field(
        default="test_real", metadata={"help": "Complex-Edit's photographs, or its generated images."}
    )
    allow_test_sets: bool = field(default=False, metadata={"help": "Train on a known test set."})
    held_out: float = field(
        default=0.1, metadata={"help": "Share of the source images for evaluation; nothing is held out with --eval_strategy no."}
    )
    eval_tasks: int = field(default=64, metadata={"help": "Largest number of held-out tasks in an evaluation."})
    encoder: Literal["policy", "frozen"] = field(
        default="policy", metadata={"help": "The model that encodes responses for the editor."}
    )
    num_steps: int = field(default=6, metadata={"help": "Denoising steps per image."})
    guidance_scale: float = field(default=1.0, metadata={"help": "Classifier-free guidance scale; 1 means none."})
    judge: str | None = field(default=None, metadata={"help": "Name of the judge model; the playground's exact judge by default."})
    judge_url: str = "https://api.openai.com/v1"
    n_evals: int = field(default=3, metadata={"help": "Number of answers of the judge that are averaged."})
    judge_weights: str = field(default="alignment=0.6,quality=0.4", metadata={"help": "Columns of the judge and their weights."})


def main(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    """Train, save the adapter, and return the trainer."""
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config(args=arguments)
    if script.encoder == "policy" and is_deepspeed_zero3_enabled():
        raise ValueError("ZeRO-3 shards the weights that read responses, which a reward function cannot gather; take ZeRO-2")
    evaluates = training.eval_strategy != "no"
    reward, combine = reward_of(script)
    dtype = model.dtype if model.dtype in ("bfloat16", "float16") else "float32"
    published = IMAGE_MODELS.load(script.editor_kind)
    image_model = PlaygroundModel() if script.editor is None else published(path=script.editor, dtype=dtype)
    sets = sets_of(script, seed=training.seed, evaluates=evaluates, images=image_model.takes.images)
    tasks = ConcatDataset([sets.train, sets.heldout])
    if model.model_name_or_path is None or script.editor is None:
        language_model = PlaygroundWriter(path=model.model_name_or_path)
    else:
        attention = model.attn_implementation or "sdpa"
        language_model = QwenLanguageModel(kind="qwen-vl", path=model.model_name_or_path, dtype=dtype, attention=attention)
    section = ResponseRenderer(
        model=image_model, encoder=script.encoder, num_steps=script.num_steps, guidance_scale=script.guidance_scale
    )
    writer, editor = section.load(
        lambda: language_model.build(device=training.device, gradient_checkpointing=False),
        device=training.device,
        base_frozen=False,
    )
    model.lora_target_modules = model.lora_target_modules or list(language_model.lora_targets)
    policy = get_peft_model(writer.module, get_peft_config(model))
    renderer = section.build(editor, writer, published=policy.disable_adapter)
    rows, trained_on = dataset_of(tasks, writer), len(sets.train)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=RetouchReward(
            writer, renderer, reward, combine=combine, task=lambda row: tasks[row["task"]], seed=training.seed
        ),
        args=training,
        train_dataset=rows.select(range(trained_on)),
        eval_dataset=rows.select(range(trained_on, len(tasks))) if evaluates else None,
        processing_class=processor_for(writer),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    return trainer


def sets_of(script: ScriptArguments, *, seed: int, evaluates: bool, images: tuple[int, int]) -> DataSets:
    """The tasks from which the writer's prompts are made, and the held-out tasks, which share no source image with them.

    ``images``: the smallest and the largest number of source images that the editor takes.
    """
    if script.photos is not None and script.complex_edit is not None:
        raise ValueError("--photos and --complex_edit are both given; give one data set")
    if script.complex_edit is not None and not script.allow_test_sets:
        raise ValueError(
            "Complex-Edit has only test splits, which are not for training: give --allow_test_sets true, or convert "
            "UCSC-VLAA/GPT-Image-Edit-1.5M (`retouch data convert gpt-image-edit DIR`) for --photos DIR"
        )
    if script.photos is None and script.complex_edit is None:
        playground = IndirectPlaygroundData(seed=seed, count=10_000, complexity=[1, 2, 3])
        heldout = playground.for_evaluation(tasks=script.eval_tasks, seed=seed, split="test", complexity=None)
        return DataSets(playground.tasks(in_turn=True), heldout.tasks(in_turn=True))
    shared = {"held_out": script.held_out if evaluates else 0.0, "allow_test_sets": script.allow_test_sets}
    if script.complex_edit is not None:
        data: ImageData = ComplexEditData(
            path=script.complex_edit, split=script.complex_edit_split, complexity=script.complexity, **shared
        )
    else:
        data = FolderData(path=script.photos, **shared)
    return data.build(DataContext(seed=seed, eval_tasks=script.eval_tasks, required=RowRequirements(images=images)))


def reward_of(script: ScriptArguments) -> tuple[Reward, Mapping[str, float]]:
    """The reward, and the weights of its columns."""
    if script.judge is None:
        if script.photos is not None or script.complex_edit is not None:
            raise ValueError("the playground's judge scores only playground tasks; name the model of a judge with --judge")
        return PlaygroundReward(), {"overall": 1.0}
    pairs = (part.split("=") for part in script.judge_weights.split(","))
    combine = {aspect: float(weight) for aspect, weight in pairs}
    judge = Endpoint(model=script.judge, base_url=script.judge_url)
    return AspectsReward(judge=judge, aspects=tuple(combine), n_evals=script.n_evals).build(), combine


if __name__ == "__main__":
    main()
