// PPO with a learned value head on the word world: every sample is of a word of its own, compared to what the head expected of it.
local grpo = import 'words-grpo.jsonnet';

grpo {
  name: 'words-ppo-value',
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  advantage: { kind: 'gae' },
  eval+: { best_of_k: 0 },
}
