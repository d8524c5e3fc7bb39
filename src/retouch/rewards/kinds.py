"""All kinds of rewards, one line each. A recipe imports the class of a kind when it names it.

A package of yours adds a kind by an entry point ``reward.NAME`` of the group ``retouch.plugins``; its class derives from
``retouch.rewards.base.RewardSection``.
"""

from typing import Annotated, TypeAlias

from retouch.config.kinds import Kinds
from retouch.rewards.base import RewardSection

_PARTS = {
    "playground": "retouch.playground.judges.edit_judge:PlaygroundReward",
    "playground-paintings": "retouch.playground.judges.painting_judge:PaintingReward",
    "playground-signs": "retouch.playground.judges.sign_judge:SignReward",
    "photos": "retouch.rewards.scorers.photos:PhotosReward",
    "share": "retouch.rewards.scorers.pixels:ShareReward",
    "compressibility": "retouch.rewards.scorers.pixels:CompressibilityReward",
    "clip": "retouch.rewards.scorers.clip:ClipReward",
    "pickscore": "retouch.rewards.scorers.clip:PickScoreReward",
    "aesthetic": "retouch.rewards.scorers.aesthetic:AestheticReward",
    "dino": "retouch.rewards.scorers.dino:DinoReward",
    "lpips": "retouch.rewards.scorers.lpips:LpipsReward",
    "hps": "retouch.rewards.scorers.clip:HpsReward",
    "image_reward": "retouch.rewards.scorers.image_reward:ImageRewardScore",
    "geneval": "retouch.rewards.scorers.geneval:GenEvalReward",
    "appearance": "retouch.rewards.scorers.appearance:AppearanceReward",
    "painted_text": "retouch.rewards.text.painted_text:PaintedTextReward",
    "ocr": "retouch.rewards.text.ocr:OcrReward",
    "thinking": "retouch.rewards.text.thinking:ThinkReward",
    "prompt_quality": "retouch.rewards.text.prompt_quality:PromptQualityReward",
    "import": "retouch.rewards.imported:ImportedReward",
    "aspects": "retouch.rewards.judges.aspects:AspectsReward",
    "viescore": "retouch.rewards.judges.viescore:VieScore",
    "editscore": "retouch.rewards.judges.viescore:EditScore",
    "complex_edit": "retouch.rewards.judges.complex_edit:ComplexEditReward",
    "ground": "retouch.rewards.judges.ground:GroundReward",
    "yes": "retouch.rewards.judges.one_token:YesReward",
    "digit": "retouch.rewards.judges.one_token:DigitReward",
    "win_rate": "retouch.rewards.judges.win_rate:WinRateReward",
    "remote": "retouch.rewards.client.remote:RemoteReward",
}

PARTS = Kinds("reward", _PARTS)
"""The rewards that ``several`` may contain: all but itself."""
KINDS = Kinds("reward", {**_PARTS, "several": "retouch.rewards.combine.several:SeveralRewards"})

AnyReward: TypeAlias = Annotated[RewardSection, KINDS]
"""A reward of any kind, as the type of a field."""
