"""The objectives and advantages that a recipe can choose from, one row a kind."""

from retouch.config.kinds import Kinds

OBJECTIVES = Kinds(
    "objective",
    {
        "policy_gradient": "retouch.objectives.policy_gradient:PolicyGradient",
        "nft": "retouch.objectives.nft:NFT",
        "awm": "retouch.objectives.awm:AWM",
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
        "gae": "retouch.objectives.advantages:GAEAdvantage",
    },
)
