// DiffusionNFT on the playground, to compare with the quickstart: same tasks, judge and number of samples, with another sampler and
// objective.
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-nft',
  learning_rate: 2e-4,
  rollout: sampling.pictures(6),
  objective: objectives.nft { shift: 3 },
}
