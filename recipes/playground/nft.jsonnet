// DiffusionNFT on the playground, to compare with grpo.jsonnet: same tasks, judge and number of samples, with another sampler and
// objective.
local grpo = import 'grpo.jsonnet';
local objectives = import '../lib/objectives.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

grpo {
  name: 'playground-nft',
  learning_rate: 2e-4,
  rollout: sampling.pictures(6),
  objective: objectives.nft { shift: 3 },
}
