// GRPO on the playground (Flow-GRPO-Fast), beside the headline recipe: same tasks and judge, another way to sample and to learn.
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-grpo',
  learning_rate: 2.5e-4,
  rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
  objective: objectives.grpo(1e-4),
}
