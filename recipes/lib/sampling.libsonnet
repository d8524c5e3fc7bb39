// How rollouts are sampled.
{
  // Flow-GRPO-Fast: a few stochastic steps, in a window that is drawn for each training step; only these steps are trained.
  window(num_steps, size, high, transition):: {
    num_steps: num_steps,
    transition: transition,
    window: { mode: 'window', size: size, low: 0, high: high },
  },
  sde(noise_level):: { kind: 'sde', noise_level: noise_level },
  cps(noise_level):: { kind: 'cps', noise_level: noise_level },
  // Deterministic sampling, for objectives that need only the images.
  pictures(num_steps):: { num_steps: num_steps, transition: { kind: 'ode' } },
}
