// Best of n, distilled into few denoising steps: images are sampled with 12 steps, the policy imitates the best two of twelve
// images, and it is evaluated with 3 steps.
local raft = import 'raft.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

raft {
  name: 'playground-distill',
  rollout: sampling.pictures(12),
  eval+: { num_steps: 3 },
}
