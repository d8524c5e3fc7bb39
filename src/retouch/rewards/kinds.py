"""All kinds of rewards, one line each: single rewards, and ``several`` and ``calibrated`` rewards, which contain other rewards.

The class of a kind is imported when a recipe names the kind. A package of your own adds a kind with an entry point ``reward.NAME``
in the group ``retouch.plugins``; its class derives from ``retouch.rewards.base.RewardSection``.
"""

from typing import Annotated, TypeAlias

from retouch.config.section import Kinds
from retouch.rewards.base import RewardSection

SINGLE = {
    "photos": "retouch.rewards.scorers.pixels:PhotosReward",
    "grade": "retouch.rewards.scorers.pixels:GradeReward",
    "share": "retouch.rewards.scorers.pixels:ShareReward",
    "target": "retouch.rewards.scorers.pixels:TargetReward",
    "compressibility": "retouch.rewards.scorers.pixels:CompressibilityReward",
    "clip": "retouch.rewards.scorers.clip:ClipReward",
    "pickscore": "retouch.rewards.scorers.clip:PickScoreReward",
    "aesthetic": "retouch.rewards.scorers.clip:AestheticReward",
    "dino": "retouch.rewards.scorers.dino:DinoReward",
    "style": "retouch.rewards.scorers.dino:StyleReward",
    "lpips": "retouch.rewards.scorers.lpips:LpipsReward",
    "hps": "retouch.rewards.scorers.clip:HpsReward",
    "image_reward": "retouch.rewards.scorers.clip:ImageRewardScore",
    "geneval": "retouch.rewards.scorers.geneval:GenEvalReward",
    "appearance": "retouch.rewards.scorers.pixels:AppearanceReward",
    "unrequested_text": "retouch.rewards.text.ocr:UnrequestedTextReward",
    "ocr": "retouch.rewards.text.ocr:OcrReward",
    "thinking": "retouch.rewards.text.completions:ThinkReward",
    "sentence_similarity": "retouch.rewards.text.completions:SentenceSimilarityReward",
    "prompt_quality": "retouch.rewards.text.completions:PromptQualityReward",
    "function": "retouch.rewards.function:FunctionReward",
    "import": "retouch.rewards.function:ImportedReward",
}
"""The rewards that other rewards may contain."""
PARTS = Kinds("reward", SINGLE, with_wings=True)
"""The rewards that ``calibrated`` may contain."""
_TABLE = {
    **SINGLE,
    "several": "retouch.rewards.several:SeveralRewards",
    "calibrated": "retouch.rewards.several:CalibratedReward",
}

KINDS = Kinds("reward", _TABLE, with_wings=True)

AnyReward: TypeAlias = Annotated[RewardSection, KINDS]
"""Type of a field that contains a reward of any kind."""

RunReward: TypeAlias = Annotated[
    RewardSection, Kinds("reward", {**_TABLE, "none": "retouch.rewards.base:NoReward"}, with_wings=True)
]
"""Type of the ``reward`` field of a run: a reward of any kind, or ``none``."""
