// The control of the headline recipe: as many samples through the base's own objective, on the base's own data (single edits, and
// clauses that nothing comes of).
local playground = import '../lib/playground.libsonnet';
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'playground-supervised',
  tasks_per_step: quickstart.tasks_per_step * quickstart.group_size,
  group_size: 1,
  data: playground.tasks(complexity=[1], count=200000, vain=0.6),
  objective: { kind: 'supervised', sigma_sampling: 'uniform', shift: 3 },
}
