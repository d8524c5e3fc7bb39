// Text rendering with batch-relative advantages: every sample is compared with all samples of the step instead of the samples of
// its task.
local words = import 'words-grpo.jsonnet';

words {
  name: 'words-ppo',
  advantage: { kind: 'batch' },
  eval+: { best_of_k: 0 },
}
