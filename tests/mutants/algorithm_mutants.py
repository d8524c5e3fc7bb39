"""Deliberate bugs in DPPO, GDPO, DGPO and the hinge on the velocity's norm."""

from mutant import Mutant

_POLICY = "tests/objectives/test_policy_gradient.py"
_DPPO = f"{_POLICY}::test_dppo_leaves_out_transitions_whose_means_have_moved_far_with_the_advantage[mean]"

ALGORITHMS = (
    Mutant(
        "dppo leaves out every action that has moved far",
        "core/surrogates.py",
        "left_out = moved & (",
        "left_out = (",
        _DPPO,
    ),
    Mutant(
        "dppo measures no KL of transitions",
        "policies/denoising.py",
        "gaussian_kl(made.mean.detach(), means,",
        "gaussian_kl(made.mean.detach(), made.mean.detach(),",
        _DPPO,
    ),
    Mutant(
        "dppo measures the KL of tokens without the other tokens",
        "core/surrogates.py",
        "return log_p.exp() * (log_p - log_q) + torch.xlogy(other_p, other_p) - torch.xlogy(other_p, other_q)",
        "return log_p.exp() * (log_p - log_q)",
        f"{_POLICY}::test_loss_and_gradient_match_hand_written_surrogates[0-dppo]",
    ),
)
