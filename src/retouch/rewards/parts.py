"""The kinds of single rewards, one line each; ``several`` and ``calibrated``, which contain other rewards, are in ``kinds.py``.

The class of a kind is imported when a recipe names the kind.
"""

from retouch.config.kinds import Kinds

SINGLE = {
    "photos": "retouch.rewards.scorers.photos:PhotosReward",
    "grade": "retouch.rewards.scorers.grade:GradeReward",
    "share": "retouch.rewards.scorers.pixels:ShareReward",
    "target": "retouch.rewards.scorers.pixels:TargetReward",
    "compressibility": "retouch.rewards.scorers.pixels:CompressibilityReward",
    "clip": "retouch.rewards.scorers.clip:ClipReward",
    "pickscore": "retouch.rewards.scorers.clip:PickScoreReward",
    "aesthetic": "retouch.rewards.scorers.aesthetic:AestheticReward",
    "dino": "retouch.rewards.scorers.dino:DinoReward",
    "style": "retouch.rewards.scorers.style:StyleReward",
    "lpips": "retouch.rewards.scorers.lpips:LpipsReward",
    "hps": "retouch.rewards.scorers.clip:HpsReward",
    "image_reward": "retouch.rewards.scorers.image_reward:ImageRewardScore",
    "geneval": "retouch.rewards.scorers.geneval:GenEvalReward",
    "appearance": "retouch.rewards.scorers.appearance:AppearanceReward",
    "unrequested_text": "retouch.rewards.text.unrequested_text:UnrequestedTextReward",
    "ocr": "retouch.rewards.text.ocr:OcrReward",
    "thinking": "retouch.rewards.text.thinking:ThinkReward",
    "sentence_similarity": "retouch.rewards.text.sentence_similarity:SentenceSimilarityReward",
    "prompt_quality": "retouch.rewards.text.prompt_quality:PromptQualityReward",
    "completion_quality": "retouch.rewards.text.completion_quality:CompletionQualityReward",
    "function": "retouch.rewards.function:FunctionReward",
    "import": "retouch.rewards.imported:ImportedReward",
    "aspects": "retouch.rewards.judges.aspects:AspectsReward",
    "viescore": "retouch.rewards.judges.viescore:VieScore",
    "editscore": "retouch.rewards.judges.viescore:EditScore",
    "complex_edit": "retouch.rewards.judges.complex_edit:ComplexEditReward",
    "ground": "retouch.rewards.judges.ground:GroundReward",
    "mmmg": "retouch.rewards.judges.mmmg:MmmgReward",
    "yes": "retouch.rewards.judges.one_token:YesReward",
    "digit": "retouch.rewards.judges.one_token:DigitReward",
    "win_rate": "retouch.rewards.judges.win_rate:WinRateReward",
}

RENAMED = {"painted_text": "unrequested_text", "playground-paintings": "playground-scenes"}

PARTS = Kinds("reward", SINGLE, renamed=RENAMED, with_wings=True)
"""The rewards that ``calibrated`` may contain."""
