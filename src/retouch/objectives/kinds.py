"""The objectives and advantages that a recipe can choose from, one row a kind."""

from retouch.config.section import Kinds

_CLIP = "kind: 'policy_gradient', surrogate: 'clip', and clip_low and clip_high"
_DPPO = "kind: 'policy_gradient', surrogate: 'dppo', kl_limit:"
_DPPO = f"{_DPPO} 1e-5 (for tokens, {_DPPO} 0.05)"
_REINFORCE = "kind: 'policy_gradient', surrogate: 'reinforce'"
_NFT = "kind: 'nft'"
_WEIGHTED = f"kind: 'awm' (for tokens, {_REINFORCE})"
_BEST_OF_N = f"{_WEIGHTED}, and advantage: {{ kind: 'best' }}"
_REWARD_WEIGHTED = f"{_WEIGHTED}, and advantage: {{ kind: 'exponential' }}"

_DISTILLATION = "kind: 'opd', teachers: { earlier: { run: 'runs/NAME' } }"

OBJECTIVES = Kinds(
    "objective",
    {
        "policy_gradient": "retouch.objectives.policy_gradient:PolicyGradient",
        "nft": "retouch.objectives.nft:NFT",
        "awm": "retouch.objectives.nft:AWM",
        "draft": "retouch.objectives.reward_gradient:DRaFT",
        "refl": "retouch.objectives.reward_gradient:ReFL",
        "opd": "retouch.objectives.distillation:OPD",
        "dpo": "retouch.objectives.dpo:DPO",
        "dgpo": "retouch.objectives.dpo:DGPO",
        "crd": "retouch.objectives.dpo:CRD",
        "supervised": "retouch.objectives.imitation:Supervised",
        "sft": "retouch.objectives.imitation:CrossEntropy",
    },
    other_names={
        "grpo": _CLIP,
        "flow_grpo": _CLIP,
        "ppo": f"{_CLIP}; advantage: {{ kind: 'gae' }} adds a value head",
        "gspo": "kind: 'policy_gradient', surrogate: 'gspo', and clip_low and clip_high",
        "cispo": "kind: 'policy_gradient', surrogate: 'cispo', and clip_high",
        "dppo": _DPPO,
        "flow_dppo": _DPPO,
        "reinforce": _REINFORCE,
        "rloo": f"{_REINFORCE}, and advantage: {{ kind: 'group', baseline: 'leave_one_out', scale: 'none' }}",
        "diffusion_nft": _NFT,
        "diffusionnft": _NFT,
        "distillation": _DISTILLATION,
        "diffusion_opd": _DISTILLATION,
        "flow_opd": _DISTILLATION,
        "raft": _BEST_OF_N,
        "best_of_n": _BEST_OF_N,
        "rwr": _REWARD_WEIGHTED,
        "reward_weighted_regression": _REWARD_WEIGHTED,
    },
)

ADVANTAGES = Kinds(
    "advantage",
    {
        "group": "retouch.objectives.advantages:GroupAdvantage",
        "batch": "retouch.objectives.advantages:BatchAdvantage",
        "gdpo": "retouch.objectives.advantages:GDPOAdvantage",
        "best": "retouch.objectives.advantages:BestAdvantage",
        "exponential": "retouch.objectives.advantages:ExponentialAdvantage",
        "gae": "retouch.objectives.advantages:GAEAdvantage",
    },
)
