// grpo.jsonnet with dynamic sampling as in DAPO: groups whose images all have the same score are replaced with samples of other
// tasks, at most twice in a step.
local grpo = import 'grpo.jsonnet';

grpo {
  name: 'playground-refill',
  rollout+: { refill: { rounds: 2 } },
}
