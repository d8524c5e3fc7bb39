"""The rewards that other rewards may contain, one line each."""

from retouch.config.section import Kinds

SINGLE = {
    "photos": "retouch.rewards.pixels:PhotosReward",
    "grade": "retouch.rewards.pixels:GradeReward",
    "share": "retouch.rewards.pixels:ShareReward",
    "target": "retouch.rewards.pixels:TargetReward",
    "compressibility": "retouch.rewards.pixels:CompressibilityReward",
    "appearance": "retouch.rewards.pixels:AppearanceReward",
    "function": "retouch.rewards.function:FunctionReward",
    "import": "retouch.rewards.function:ImportedReward",
}

PARTS = Kinds("reward", SINGLE, with_wings=True)
"""The rewards that ``calibrated`` may contain."""
