"""Converts the argument ``peft_config`` of a ``Trainer`` to ``policy.train``."""

from typing import Any

from retouch.config.section import Section
from retouch.models.train import FullWeights, Lora


def train_document(peft_config: Any) -> dict[str, Any]:
    """The document of ``policy.train`` for None (all weights), a section, or a ``peft.LoraConfig``."""
    if peft_config is None:
        return FullWeights().model_dump(mode="json")
    if isinstance(peft_config, Section):
        return peft_config.model_dump(mode="json")
    if type(peft_config).__name__ == "LoraConfig":
        _require_usual(peft_config)
        targets = peft_config.target_modules
        lora = Lora(
            rank=peft_config.r,
            alpha=float(peft_config.lora_alpha),
            targets=None if targets is None else tuple(sorted(targets)),
            dropout=float(peft_config.lora_dropout),
        )
        return lora.model_dump(mode="json")
    raise ValueError(f"peft_config: {type(peft_config).__name__}; give retouch.Lora(rank=32), a peft.LoraConfig, or None")


def _require_usual(config: Any) -> None:
    """Raise ValueError for each setting of a ``peft.LoraConfig`` that would be lost in a recipe."""
    from retouch.models.common.lora import DESCRIPTIVE, unusual_fields

    problems = []
    if isinstance(config.target_modules, str):
        problems.append(
            f"peft_config.target_modules: {config.target_modules!r} is a pattern; give a list of endings of layer names, such as "
            "['to_q', 'to_v'], or None for the usual layers of the model's family"
        )
    supported = ("r", "lora_alpha", "lora_dropout", "target_modules")
    initial = ("init_lora_weights",) if config.init_lora_weights == "gaussian" else ()  # how policy.train initializes a LoRA
    unusual = unusual_fields(vars(config), vars(type(config)()), known=(*supported, *DESCRIPTIVE, *initial))
    problems += [
        f"peft_config.{name}: {value!r} is not supported; leave it at {default!r}. Retouch uses {', '.join(supported)}"
        for name, (value, default) in unusual.items()
    ]
    if problems:
        raise ValueError("\n".join(problems))
