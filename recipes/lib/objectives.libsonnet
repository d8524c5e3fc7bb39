// Objectives: how advantages become a loss.
{
  // PPO's clip for log-probabilities that are averaged over the latent, hence the small ranges.
  grpo(clip):: { kind: 'policy_gradient', surrogate: 'clip', clip_low: clip, clip_high: clip },
  nft:: { kind: 'nft', beta: 1, old_decay: { rate: 0.001, max: 0.5 } },
}
