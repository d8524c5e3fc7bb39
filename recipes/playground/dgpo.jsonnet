// DGPO on the playground, to compare with grpo.jsonnet: same tasks, judge and number of samples. The good images of each task are
// preferred to its bad ones, with their advantages as weights, so images can be sampled without noise.
local grpo = import 'grpo.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

grpo {
  name: 'playground-dgpo',
  rollout: sampling.pictures(6),
  objective: { kind: 'dgpo', shift: 3 },
}
