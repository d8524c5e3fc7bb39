// GRPO on the playground, beside the headline recipe: same tasks, judge and samples, another way to sample and to learn.
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-grpo',
  rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
  objective: objectives.grpo(1e-4),
}
