// The recipes of EARL with the playground's image-token editor instead of Emu3: base models, three mixtures of edits, and stages.
local playground = import 'playground.libsonnet';

{
  // Simple edits (s), complex edits (c), and both (sc).
  mixtures:: {
    s: { '1': 1 },
    c: { '2': 1, '3': 1 },
    sc: { '1': 1, '2': 1, '3': 1 },
  },
  base(name, start, mixture, think):: {
    name: name,
    microbatch: 128,
    policy: {
      kind: 'autoregressive',
      model: { kind: 'playground-emu3', start: start } + (if think then { think: true } else {}),
      train: { kind: 'full' },
      ema: { decay: 0.95 },
    },
    rollout: { kind: 'tokens', max_new_tokens: if think then 72 else 24 },
    renderer: { kind: 'codes', batch: 128 },
    data: playground.tasks($.mixtures[mixture], filler=0.25) + (if think then { thought: true } else {}),
    reward: playground.judge,
    optimizer: { schedule: 'cosine' },
    eval: { tasks: 330, complexity: [1, 2, 3], column: 'overall', headline: { complexity: ['2', '3'] }, best_of_k: 8, batch: 110 },
    samples: { every: 60, tasks: 8 },
    checkpoints: { every: 40, keep: 2 },
  },
  // Steps of supervised learning. A model that learns to think has longer completions to learn, and needs more of them.
  taught(think):: if think then 500 else 200,
  // EARL's objective: no ratio, one update per rollout, a mean over tokens, and a KL to the base model.
  earl:: {
    kind: 'policy_gradient',
    surrogate: 'reinforce',
    normalise: 'token',
    kl: { kind: 'k3', weight: 0.02 },
  },
  rl(name, start, mixture, think=false):: $.base(name, start, mixture, think) {
    steps: 150,
    tasks_per_step: 16,
    group_size: 8,
    learning_rate: 2e-4,
    objective: $.earl,
  },
  supervised(name, start, mixture, think=false):: $.base(name, start, mixture, think) {
    steps: $.taught(think),
    tasks_per_step: 64,
    group_size: 1,
    learning_rate: 5e-4,
    objective: { kind: 'sft' },
  },
  // A stage of supervised learning, followed by RL.
  stages(name, start, taught, mixture, think=false):: $.rl(name, start, mixture, think) {
    steps: null,
    phases: [
      {
        name: 'supervised',
        steps: $.taught(think),
        tasks_per_step: 64,
        group_size: 1,
        learning_rate: 5e-4,
        objective: { kind: 'sft' },
        data: playground.tasks($.mixtures[taught], filler=0.25, seed=1) + (if think then { thought: true } else {}),
      },
      { name: 'rl', steps: 150 },
    ],
  },
}
