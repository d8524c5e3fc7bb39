// DiffusionNFT on the word world: the same tasks, reader and samples, another way to sample and to learn.
local objectives = import '../lib/objectives.libsonnet';
local sampling = import '../lib/sampling.libsonnet';
local words = import '../lib/words.libsonnet';

words.base('words-nft') {
  steps: 100,
  learning_rate: 5e-4,
  rollout: sampling.pictures(6),
  objective: objectives.nft { shift: 3 },
}
