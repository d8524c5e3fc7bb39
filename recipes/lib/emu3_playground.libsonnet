// The playground's editor of image tokens, in place of EARL's Emu3: its two starts, its three mixtures, its stages.
local playground = import 'playground.libsonnet';

{
  // Simple edits, complex ones, and both.
  mixtures:: {
    s: { '1': 1 },
    c: { '2': 1, '3': 1 },
    sc: { '1': 1, '2': 1, '3': 1 },
  },
  base(name, start, mixture):: {
    name: name,
    microbatch: 128,
    policy: {
      kind: 'autoregressive',
      model: { kind: 'playground-emu3', start: start },
      train: { kind: 'full' },
      ema: { decay: 0.95 },
    },
    rollout: { kind: 'tokens', max_new_tokens: 24 },
    renderer: { kind: 'codes', batch: 128 },
    data: playground.tasks($.mixtures[mixture], filler=0.25),
    reward: playground.judge,
    optimizer: { schedule: 'cosine' },
    eval: { tasks: 330, complexity: [1, 2, 3], column: 'overall', headline: { complexity: ['2', '3'] }, best_of_k: 8, batch: 110 },
    samples: { every: 60, tasks: 8 },
    checkpoints: { every: 40, keep: 2 },
  },
  // EARL's objective: no ratio and one step on a rollout, a mean over tokens, and a pull to the start.
  rl(name, start, mixture):: $.base(name, start, mixture) {
    steps: 150,
    tasks_per_step: 16,
    group_size: 8,
    learning_rate: 1e-4,
    objective: {
      kind: 'policy_gradient',
      surrogate: 'reinforce',
      normalise: 'token',
      kl: { kind: 'k3', weight: 0.02 },
    },
  },
  supervised(name, start, mixture):: $.base(name, start, mixture) {
    steps: 150,
    tasks_per_step: 128,
    group_size: 1,
    learning_rate: 3e-4,
    objective: { kind: 'sft' },
  },
}
