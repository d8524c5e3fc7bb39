// DiffusionNFT for text rendering: the same tasks, reward and number of samples as words-grpo, with another sampler and objective.
local objectives = import '../lib/objectives.libsonnet';
local sampling = import '../lib/sampling.libsonnet';
local words = import '../lib/words.libsonnet';

words.base('words-nft') {
  steps: 100,
  learning_rate: 5e-4,
  rollout: sampling.pictures(6),
  objective: objectives.nft { shift: 3 },
}
