"""The rewards that other rewards may contain, one line each."""

from retouch.config.section import Kinds

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
    "lpips": "retouch.rewards.scorers.dino:LpipsReward",
    "hps": "retouch.rewards.scorers.clip:HpsReward",
    "hpsv3": "retouch.rewards.scorers.clip:HPSv3Reward",
    "editreward": "retouch.rewards.scorers.clip:EditReward",
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

PARTS = Kinds("reward", SINGLE, with_wings=True)
"""The rewards that ``calibrated`` may contain."""
