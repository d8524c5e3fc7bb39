// Objectives: the losses and their settings.
{
  // PPO's clipped surrogate. Log-probabilities are averaged over the latent, hence the small clip ranges.
  grpo(clip):: { kind: 'policy_gradient', surrogate: 'clip', clip_low: clip, clip_high: clip },
  nft:: { kind: 'nft', beta: 1, old_decay: { rate: 0.001, max: 0.5 } },
  // The gradient of a reward through the last steps of the chain (DRaFT-K), or through the image predicted in a late step (ReFL).
  draft(steps, reward):: { kind: 'draft', steps: steps, reward: reward },
  refl(low, reward):: { kind: 'refl', low: low, reward: reward },
}
