// The main job on the playground: a flow-matching editor that does single edits learns compound ones, in minutes on two cores.
//
//   retouch train recipes/quickstart.jsonnet
local objectives = import 'lib/objectives.libsonnet';
local playground = import 'lib/playground.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'quickstart',
  steps: 120,
  tasks_per_step: 8,
  group_size: 12,
  learning_rate: 2e-4,
  microbatch: 96,
  policy: {
    kind: 'denoising',
    model: playground.model,
    train: { kind: 'full' },
    ema: { decay: 0.95, every: 1 },
  },
  rollout: sampling.pictures(6),
  data: playground.tasks(complexity=[2, 3]),
  reward: playground.judge,
  advantage: { kind: 'group' },
  objective: objectives.nft,
  eval: { tasks: 330, complexity: [1, 2, 3], column: 'overall', headline: { complexity: ['2', '3'] }, best_of_k: 6, batch: 330 },
  samples: { every: 40, tasks: 8 },
  checkpoints: { every: 40, keep: 2 },
}
