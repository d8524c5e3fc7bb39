// GRPO on the task of the quickstart, with few tasks per step, many samples of each, and one optimizer step per rollout. The other
// algorithms in this folder are compared with it.
//
//   retouch train recipes/playground/grpo.jsonnet
local objectives = import '../lib/objectives.libsonnet';
local playground = import '../lib/playground.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

{
  name: 'playground-grpo',
  steps: 120,
  tasks_per_step: 8,
  group_size: 12,
  learning_rate: 3e-4,
  microbatch: 96,
  policy: {
    kind: 'denoising',
    model: playground.model,
    train: { kind: 'full' },
    ema: { decay: 0.95, every: 1 },
  },
  rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
  // A quarter of the tasks are single edits, so that the policy does not forget what the base model can do.
  data: playground.tasks(complexity={ '1': 1, '2': 2, '3': 1 }),
  reward: playground.judge,
  advantage: { kind: 'group' },
  objective: objectives.grpo(1e-4),
  optimizer: { schedule: 'cosine' },
  eval: { tasks: 330, complexity: [1, 2, 3], column: 'overall', headline: { complexity: ['2', '3'] }, best_of_k: 6, batch: 110 },
  samples: { every: 60, tasks: 8 },
  checkpoints: { every: 40, keep: 2 },
}
