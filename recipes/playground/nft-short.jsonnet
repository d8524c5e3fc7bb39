// DiffusionNFT on the playground with a quarter of the quickstart's network evaluations, for a little less gain: many tasks with
// few samples each, four denoising steps in rollouts, and sigma close to 1. The trials behind these values are in
// docs/quickstart-trials.md.
//
//   retouch train recipes/playground/nft-short.jsonnet
local objectives = import '../lib/objectives.libsonnet';
local quickstart = import '../quickstart.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

quickstart {
  name: 'playground-nft-short',
  steps: 45,
  tasks_per_step: 32,
  group_size: 3,
  learning_rate: 5e-4,
  microbatch: 24,
  rollout: sampling.pictures(4) { chunk: 24 },
  objective: objectives.nft { shift: 8 },
  optimizer: { schedule: 'cosine', warmup_steps: 5 },
  eval+: { num_steps: 6 },
}
