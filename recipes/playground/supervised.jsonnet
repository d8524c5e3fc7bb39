// The control for the quickstart: continued supervised learning on the data of the base model (single edits, and clauses without
// effect), with as many samples.
local playground = import '../lib/playground.libsonnet';
local quickstart = import '../quickstart.jsonnet';

quickstart {
  name: 'playground-supervised',
  tasks_per_step: quickstart.tasks_per_step * quickstart.group_size,
  group_size: 1,
  data: playground.tasks(complexity=[1], count=200000, impossible=0.6),
  objective: { kind: 'supervised', sigma_sampling: 'uniform', shift: 3 },
}
