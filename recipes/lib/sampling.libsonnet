// Ways to sample while learning.
{
  // Flow-GRPO-Fast: a few noisy steps, in a window drawn anew each step of training; only they train.
  window(num_steps, size, high, transition):: {
    num_steps: num_steps,
    transition: transition,
    window: { mode: 'window', size: size, low: 0, high: high },
  },
  sde(noise_level):: { kind: 'sde', noise_level: noise_level },
  cps(noise_level):: { kind: 'cps', noise_level: noise_level },
  // Deterministic: for objectives that need only the pictures.
  pictures(num_steps):: { num_steps: num_steps, transition: { kind: 'ode' } },
}
