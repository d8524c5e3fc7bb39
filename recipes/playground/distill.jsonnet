// Best of n, distilled into few steps: images are sampled with 12 denoising steps, the best two of twelve are imitated, and the
// policy is evaluated with 3 steps.
local raft = import 'raft.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

raft {
  name: 'playground-distill',
  rollout: sampling.pictures(12),
  eval+: { num_steps: 3 },
}
