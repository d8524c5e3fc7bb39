// DRaFT-K on the playground, to compare with the quickstart: same tasks, judge and number of samples. Its gradient is that of the
// distance to the target image, which the other algorithms never see: an upper reference.
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-draft',
  rollout: sampling.pictures(6),
  objective: objectives.draft(steps=2, reward={ kind: 'target' }),
}
