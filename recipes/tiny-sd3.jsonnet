// The benchmark: a Stable Diffusion 3 of the real classes, tiny and untrained, learns to make its pictures redder.
// `make bench` builds the model and the prompts.
local objectives = import 'lib/objectives.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'tiny-sd3',
  steps: 60,
  tasks_per_step: 2,
  group_size: 8,
  learning_rate: 3e-3,
  policy: {
    kind: 'denoising',
    model: { kind: 'sd3', path: 'benchmarks/tiny-sd3', size: [32, 32], dtype: 'float32' },
    train: { kind: 'lora', rank: 32, alpha: 64 },
  },
  rollout: sampling.window(num_steps=6, size=2, high=5, transition=sampling.cps(0.8)),
  data: { kind: 'prompts', path: 'benchmarks/prompts.txt' },
  reward: { kind: 'share', channel: 'red', combine: { share: 1 } },
  objective: objectives.grpo(1e-4),
  eval: { tasks: 16 },
}
