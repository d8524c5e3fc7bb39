"""GRPO of a language model with TRL, a typical user's script: the reward function prefers texts that describe light and colour.

The same script with Retouch is `trl_script_with_retouch.py`, in which each text is the prompt of an image.
"""

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

WORDS = ("light", "shadow", "glow", "red", "green", "blue", "golden", "dark", "bright", "pale")
SUBJECTS = ("a fox", "two pears", "a lighthouse", "an old bus", "a market", "a bowl of soup", "a garden", "a winter street")
dataset = Dataset.from_list([{"prompt": f"Describe a picture of {subject} in one sentence."} for subject in SUBJECTS])


def describes_light(completions, **kwargs):
    """The share of these words that occur in the text."""
    return [sum(word in text.lower() for word in WORDS) / len(WORDS) for text in completions]


args = GRPOConfig(
    output_dir="runs",
    learning_rate=1e-5,
    max_steps=300,
    num_generations=8,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    reward_funcs=describes_light,
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=32, lora_alpha=64),
)
trainer.train()
trainer.save_model("lora")
