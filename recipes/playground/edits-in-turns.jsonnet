// The quickstart's editor makes two or three edits one after the other, each on the image that it has made in the turn before.
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'edits-in-turns',
  tasks_per_step: 16,
  rollout+: { turns: { most: 3 } },
  data+: { complexity: { '2': 1, '3': 1 }, turns: true },
  eval+: { tasks: 220, complexity: [2, 3], headline: null, best_of_k: 0 },
}
