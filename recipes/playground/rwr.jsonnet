// Reward-weighted regression on the playground, to compare with grpo.jsonnet: same tasks, judge and number of samples. The policy
// imitates all its images, each with a weight that grows exponentially with its reward.
local raft = import 'raft.jsonnet';

raft {
  name: 'playground-rwr',
  advantage: { kind: 'exponential', temperature: 0.5 },
  objective+: { samples: 1 },
}
