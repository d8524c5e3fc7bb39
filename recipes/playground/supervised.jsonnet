// The control for grpo.jsonnet: continued supervised learning on the data of the base model (single edits, and clauses without
// effect), with as many samples.
local grpo = import 'grpo.jsonnet';
local playground = import '../lib/playground.libsonnet';

grpo {
  name: 'playground-supervised',
  tasks_per_step: grpo.tasks_per_step * grpo.group_size,
  group_size: 1,
  data: playground.tasks(complexity=[1], count=200000, impossible=0.6),
  objective: { kind: 'supervised', sigma_sampling: 'uniform', shift: 3 },
}
