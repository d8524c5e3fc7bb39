// DiffusionNFT on the playground, beside the headline recipe: same tasks, judge and samples, another way to sample and to learn.
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-nft',
  learning_rate: 2e-4,
  rollout: sampling.pictures(6),
  objective: objectives.nft { shift: 3 },
}
