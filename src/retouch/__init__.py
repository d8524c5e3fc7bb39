"""Reinforcement-learning post-training for image editing and generation.

``Trainer`` trains a model with rewards; the other names are parts that can be used alone. A name is imported when it is used, so
``import retouch`` is fast and imports no torch.
"""

import logging
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch.inference.opening import open_writer as open_writer
    from retouch.models.train import FullWeights as FullWeights
    from retouch.models.train import IpAdapter as IpAdapter
    from retouch.models.train import Lora as Lora
    from retouch.objectives.advantages import BatchAdvantage as BatchAdvantage
    from retouch.objectives.advantages import BestAdvantage as BestAdvantage
    from retouch.objectives.advantages import ExponentialAdvantage as ExponentialAdvantage
    from retouch.objectives.advantages import GAEAdvantage as GAEAdvantage
    from retouch.objectives.advantages import GDPOAdvantage as GDPOAdvantage
    from retouch.objectives.advantages import GroupAdvantage as GroupAdvantage
    from retouch.objectives.distillation import OPD as OPD
    from retouch.objectives.distillation import Teacher as Teacher
    from retouch.objectives.dpo import CRD as CRD
    from retouch.objectives.dpo import DGPO as DGPO
    from retouch.objectives.dpo import DPO as DPO
    from retouch.objectives.imitation import CrossEntropy as CrossEntropy
    from retouch.objectives.imitation import Supervised as Supervised
    from retouch.objectives.nft import AWM as AWM
    from retouch.objectives.nft import NFT as NFT
    from retouch.objectives.policy_gradient import CISPO as CISPO
    from retouch.objectives.policy_gradient import DPPO as DPPO
    from retouch.objectives.policy_gradient import GRPO as GRPO
    from retouch.objectives.policy_gradient import GSPO as GSPO
    from retouch.objectives.policy_gradient import REINFORCE as REINFORCE
    from retouch.objectives.policy_gradient import Kl as Kl
    from retouch.objectives.policy_gradient import PolicyGradient as PolicyGradient
    from retouch.objectives.reward_gradient import DRaFT as DRaFT
    from retouch.objectives.reward_gradient import ReFL as ReFL
    from retouch.policies.rollout import CPSTransition as CPSTransition
    from retouch.policies.rollout import ODETransition as ODETransition
    from retouch.policies.rollout import SDETransition as SDETransition
    from retouch.recipe.recipe import Recipe as Recipe
    from retouch.rewards.function import reward as reward
    from retouch.rewards.scoring import score as score
    from retouch.trainer.loaded_run import load_run as load_run
    from retouch.trainer.loaded_run import sample as sample
    from retouch.trainer.trainer import Callback as Callback
    from retouch.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
    # libgomp, which torch loads, lets idle threads wait in a loop for milliseconds, which takes the time of other processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Where torchao is installed, transformers and diffusers import it, and the import warns of kernels that this machine cannot load.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_NAMES = {
    name: f"retouch.{module}"
    for module, names in {
        "inference.opening": ("open_writer",),
        "models.train": ("FullWeights", "IpAdapter", "Lora"),
        "objectives.advantages": (
            *("BatchAdvantage", "BestAdvantage", "ExponentialAdvantage"),
            *("GAEAdvantage", "GDPOAdvantage", "GroupAdvantage"),
        ),
        "objectives.distillation": ("OPD", "Teacher"),
        "objectives.dpo": ("CRD", "DGPO", "DPO"),
        "objectives.imitation": ("CrossEntropy", "Supervised"),
        "objectives.nft": ("AWM", "NFT"),
        "objectives.policy_gradient": ("CISPO", "DPPO", "GRPO", "GSPO", "Kl", "PolicyGradient", "REINFORCE"),
        "objectives.reward_gradient": ("DRaFT", "ReFL"),
        "policies.rollout": ("CPSTransition", "ODETransition", "SDETransition"),
        "recipe.recipe": ("Recipe",),
        "rewards.function": ("reward",),
        "rewards.scoring": ("score",),
        "trainer.loaded_run": ("load_run", "sample"),
        "trainer.trainer": ("Callback", "Trainer"),
    }.items()
    for name in names
}
_PACKAGES = ("core", "models", "rewards")
_WINGS = ("benchmarks", "judge_audit", "serve", "testing")

_OTHER_NAMES = {
    **{"ppo": "use retouch.GRPO(), and advantage=retouch.GAEAdvantage() for a value head", "flowgrpo": "use retouch.GRPO()"},
    "flowdppo": "use retouch.DPPO(kl_limit=1e-5)",
    "rloo": "use retouch.REINFORCE() with advantage=retouch.GroupAdvantage(baseline='leave_one_out', scale='none')",
    **dict.fromkeys(("dapo", "drgrpo"), "use retouch.GRPO(normalise='token'), or 'dr_grpo'"),
    **dict.fromkeys(("diffusionnft", "flownft"), "use retouch.NFT()"),
    "gdpo": "use retouch.GRPO() with advantage=retouch.GDPOAdvantage(weights={'alignment': 0.6, 'quality': 0.4})",
    "sft": "use retouch.CrossEntropy() for text, and retouch.Supervised() for images",
    **dict.fromkeys(
        ("raft", "bestofn"), "use retouch.AWM(), or retouch.REINFORCE() for text, with advantage=retouch.BestAdvantage()"
    ),
    "rwr": "use retouch.AWM(), or retouch.REINFORCE() for text, with advantage=retouch.ExponentialAdvantage()",
    **dict.fromkeys(("grpotrainer", "grpoconfig"), "give all arguments to retouch.Trainer"),
    "loraconfig": "use retouch.Lora(rank=32)",
}
"""Names of other libraries and of papers, in lower case without underscores, to what to use."""

__all__ = [*sorted(_NAMES), *_PACKAGES, *_WINGS]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"retouch.{name}")
    if name in _WINGS:
        from retouch.config import wings

        return wings.load(f"name.{name}")
    from retouch.config.imports import nearest

    near = None if name.startswith("_") else nearest(name, __all__)
    hint = _OTHER_NAMES.get(name.lower().replace("_", ""), near and f"did you mean retouch.{near}?")
    raise AttributeError(f"module 'retouch' has no attribute {name!r}{'; ' * bool(hint)}{hint or ''}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
