// The quickstart with dynamic sampling as in DAPO: groups whose images all have the same score are replaced with samples of other
// tasks, at most twice in a step.
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'playground-refill',
  rollout+: { refill: { rounds: 2 } },
}
