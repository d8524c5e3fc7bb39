r"""TRL's GRPOTrainer in front of a frozen Qwen-Image-Edit: TRL trains the writer, Retouch renders and scores its completions.

On the playground, with its writer, editor and exact judge, on a CPU:

    python examples/train_grpo_trl.py --output_dir runs/trl --max_steps 20 --learning_rate 1e-3 --num_generations 8 \
        --per_device_train_batch_size 32 --max_completion_length 32 --use_peft --lora_r 32 --lora_alpha 64 --bf16 false

At full size, on 8 GPUs under accelerate's DDP or ZeRO-2, with a judge behind an OpenAI-compatible API:

    accelerate launch --num_processes 8 examples/train_grpo_trl.py --output_dir runs/trl --bf16 --dtype bfloat16 \
        --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --editor Qwen/Qwen-Image-Edit --photos DIR --judge gpt-4o --num_steps 20 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 8 --num_train_epochs 3 \
        --learning_rate 1e-5 --use_peft --lora_r 32 --lora_alpha 64 --save_steps 500
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peft import get_peft_model
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from retouch.data.playground.indirect import IndirectPlaygroundData
from retouch.data.sources.folder import read_folder
from retouch.data.tasks import Tasks
from retouch.integrations.trl import RetouchReward
from retouch.integrations.trl_prompts import dataset_of, processor_for
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.playground.family import PlaygroundModel
from retouch.models.playground.language import PlaygroundWriter
from retouch.models.qwen_vl.family import QwenLanguageModel
from retouch.protocols import Reward
from retouch.renderers.responses import ResponseRenderer
from retouch.rewards.judges.aspects import AspectsReward
from retouch.rewards.judges.panel import Panel
from retouch.rewards.playground.edit_judge import PlaygroundReward
from retouch.rewards.vlm.chat_client import ChatClient
from retouch.types import Task


@dataclass
class ScriptArguments:
    """Arguments for rendering and scoring responses. The arguments for training the writer are those of TRL."""

    editor: str | None = field(default=None, metadata={"help": "Folder or id of the editor; the playground's editor by default."})
    editor_kind: Literal["qwen-image-edit", "qwen-image-edit-plus"] = "qwen-image-edit"
    photos: str | None = field(default=None, metadata={"help": "Folder with metadata.jsonl; playground tasks by default."})
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
    dtype = model.dtype if model.dtype in ("bfloat16", "float16") else "float32"
    published = IMAGE_MODELS.load(script.editor_kind)
    image_model = PlaygroundModel() if script.editor is None else published(path=script.editor, dtype=dtype)
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
    tasks = tasks_of(script, seed=training.seed)
    reward, combine = reward_of(script)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=RetouchReward(
            writer, renderer, reward, combine=combine, task=lambda row: tasks[row["task"]], seed=training.seed
        ),
        args=training,
        train_dataset=dataset_of(tasks, writer),
        processing_class=processor_for(writer),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    return trainer


def tasks_of(script: ScriptArguments, *, seed: int) -> Sequence[Task]:
    """The tasks from which the writer's prompts are made."""
    if script.photos is not None:
        return Tasks(read_folder(script.photos), resize=None)
    return IndirectPlaygroundData(seed=seed, count=10_000, complexity=[1, 2, 3]).tasks(in_turn=True)


def reward_of(script: ScriptArguments) -> tuple[Reward, Mapping[str, float]]:
    """The reward, and the weights of its columns."""
    if script.judge is None:
        return PlaygroundReward(), {"overall": 1.0}
    pairs = (part.split("=") for part in script.judge_weights.split(","))
    combine = {aspect: float(weight) for aspect, weight in pairs}
    panel = Panel(ChatClient(model=script.judge, base_url=script.judge_url), repeats=script.n_evals)
    return AspectsReward(panel, aspects=tuple(combine)), combine


if __name__ == "__main__":
    main()
