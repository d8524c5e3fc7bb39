// PPO with a learned value head for text rendering: every sample has its own word, and its baseline is the prediction of the value
// head.
local grpo = import 'words-grpo.jsonnet';

grpo {
  name: 'words-ppo-value',
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  advantage: { kind: 'gae' },
  eval+: { best_of_k: 0 },
}
