// The main task of the playground: a flow-matching editor that makes single edits learns to follow instructions with several edits,
// in a few minutes on two CPU cores. Many tasks with few samples each, four denoising steps in rollouts, and sigmas close to 1; the
// trials behind these values are in docs/quickstart-trials.md.
//
//   retouch train recipes/quickstart.jsonnet
local objectives = import 'lib/objectives.libsonnet';
local playground = import 'lib/playground.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'quickstart',
  steps: 60,
  tasks_per_step: 32,
  group_size: 3,
  learning_rate: 5e-4,
  microbatch: 24,
  policy: {
    kind: 'denoising',
    model: playground.model,
    train: { kind: 'full' },
    ema: { decay: 0.95, every: 1 },
  },
  rollout: sampling.pictures(4) { chunk: 24 },
  // A quarter of the tasks are single edits, so that the policy does not forget what the base model can do.
  data: playground.tasks(complexity={ '1': 1, '2': 2, '3': 1 }),
  reward: playground.judge,
  advantage: { kind: 'group' },
  objective: objectives.nft { shift: 8 },
  optimizer: { schedule: 'cosine', warmup_steps: 0.1 },
  eval: {
    tasks: 330,
    complexity: [1, 2, 3],
    num_steps: 6,
    column: 'overall',
    headline: { complexity: ['2', '3'] },
    best_of_k: 6,
    batch: 110,
  },
  samples: { every: 30, tasks: 8 },
  checkpoints: { every: 20, keep: 2 },
}
