// The word world with every sample compared to all of the step instead of those of its task.
local words = import 'words-grpo.jsonnet';

words {
  name: 'words-ppo',
  advantage: { kind: 'batch' },
  eval+: { best_of_k: 0 },
}
