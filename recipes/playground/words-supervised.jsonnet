// The control of the word world: as many samples as the longest run's through the base's own objective, on the base's own demonstrations.
local words = import '../lib/words.libsonnet';

words.base('words-supervised') {
  steps: 100,
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  data: words.tasks(slips=0.5),
  objective: { kind: 'supervised', sigma_sampling: 'uniform', shift: 3 },
}
