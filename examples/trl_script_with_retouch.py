"""GRPO of a language model that writes prompts, with Retouch: `trl_script.py` after the change of ten lines or fewer.

Each prompt is rendered as an image, and a reward function can also take `images`.
"""

from datasets import Dataset
from peft import LoraConfig

from retouch import Trainer

WORDS = ("light", "shadow", "glow", "red", "green", "blue", "golden", "dark", "bright", "pale")
SUBJECTS = ("a fox", "two pears", "a lighthouse", "an old bus", "a market", "a bowl of soup", "a garden", "a winter street")
dataset = Dataset.from_list([{"prompt": f"Describe a picture of {subject} in one sentence."} for subject in SUBJECTS])


def describes_light(completions, **kwargs):
    """The share of these words that occur in the text."""
    return [sum(word in text.lower() for word in WORDS) / len(WORDS) for text in completions]


args = dict(
    output_dir="runs",
    learning_rate=1e-5,
    steps=300,
    group_size=8,
)
trainer = Trainer(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    renderer="stabilityai/stable-diffusion-3.5-medium",
    reward_funcs=describes_light,
    **args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=32, lora_alpha=64),
)
trainer.train()
trainer.save_pretrained("lora")
