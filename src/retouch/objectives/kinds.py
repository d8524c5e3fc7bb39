"""The objectives and advantages that a recipe can choose from, one row a kind."""

from retouch.config.kinds import Kinds

OBJECTIVES = Kinds(
    "objective",
    {
        "policy_gradient": "retouch.objectives.policy_gradient:PolicyGradient",
        "nft": "retouch.objectives.nft:NFT",
        "awm": "retouch.objectives.awm:AWM",
        "draft": "retouch.objectives.reward_gradient:DRaFT",
        "refl": "retouch.objectives.reward_gradient:ReFL",
        "dpo": "retouch.objectives.dpo:DPO",
        "supervised": "retouch.objectives.supervised:Supervised",
        "sft": "retouch.objectives.cross_entropy:CrossEntropy",
    },
)

ADVANTAGES = Kinds(
    "advantage",
    {
        "group": "retouch.objectives.advantages:GroupAdvantage",
        "batch": "retouch.objectives.advantages:BatchAdvantage",
        "best": "retouch.objectives.advantages:BestAdvantage",
        "exponential": "retouch.objectives.advantages:ExponentialAdvantage",
        "gae": "retouch.objectives.advantages:GAEAdvantage",
    },
)
