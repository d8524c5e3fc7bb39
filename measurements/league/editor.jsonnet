// The editor of the quickstart in short runs: smaller steps, and an average of the weights that follows faster. It does not import
// the quickstart, so that the league's runs stay valid when that changes.
local objectives = import 'lib/objectives.libsonnet';
local playground = import 'lib/playground.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'league-editor',
  steps: 1,
  tasks_per_step: 6,
  group_size: 8,
  learning_rate: 3e-4,
  microbatch: 96,
  policy: {
    kind: 'denoising',
    model: playground.model,
    train: { kind: 'full' },
    ema: { decay: 0.9 },
  },
  rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
  data: playground.tasks(complexity={ '1': 1, '2': 2, '3': 1 }),
  reward: playground.judge,
  advantage: { kind: 'group' },
  objective: objectives.grpo(1e-4),
  optimizer: { schedule: 'cosine' },
  eval: { tasks: 100, complexity: [2, 3], batch: 100 },
}
