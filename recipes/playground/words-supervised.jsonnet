// The control for text rendering: continued supervised learning on the demonstrations of the base model, with as many samples as
// the longest run.
local words = import '../lib/words.libsonnet';

words.base('words-supervised') {
  steps: 100,
  tasks_per_step: super.tasks_per_step * super.group_size,
  group_size: 1,
  data: words.tasks(wrong_letters=0.5),
  objective: { kind: 'supervised', sigma_sampling: 'uniform', shift: 3 },
}
