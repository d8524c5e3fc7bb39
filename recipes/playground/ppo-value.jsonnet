// PPO with a learned value head on the playground, to compare with grpo.jsonnet: same model, judge and samples per step, but
// every sample has its own task, because its baseline is the prediction of the value head.
local grpo = import 'grpo.jsonnet';

grpo {
  name: 'playground-ppo-value',
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  advantage: { kind: 'gae' },
}
