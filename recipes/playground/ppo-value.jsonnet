// PPO with a learned value head on the playground, beside the headline recipe: same model, judge and samples a step, but every sample
// is of a task of its own, since what it is compared to is what the head expected.
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'playground-ppo-value',
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  advantage: { kind: 'gae' },
}
