// RAFT (best-of-n fine-tuning) on the playground, to compare with grpo.jsonnet: same tasks, judge and number of samples. The
// policy imitates the best two of twelve images of each task. Only these two are evaluated in the update, so four noised
// versions of each cost less than one noised version of all twelve.
local grpo = import 'grpo.jsonnet';
local sampling = import '../lib/sampling.libsonnet';

grpo {
  name: 'playground-raft',
  learning_rate: 2e-4,
  rollout: sampling.pictures(6),
  advantage: { kind: 'best', keep: 2 },
  objective: { kind: 'awm', shift: 3, samples: 4 },
}
