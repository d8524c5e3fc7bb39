// The playground's twin of a writer in front of a frozen image model. Instructions name things as people do who see the picture ("make
// the circle red"); the writer sees it too, and says to the editor which circle. Its base mostly says the first of several edits only.
//
//   retouch train recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet
local writer = import '../lib/playground_writer.libsonnet';

writer {
  name: 'writer-grpo-frozen-playground',
  steps: 100,
  tasks_per_step: 8,
  group_size: 8,
  learning_rate: 5e-4,
  microbatch: 64,
  policy+: { entropy: true },
  // The editor's own text encoder reads what was written, and stands still.
  renderer: writer.reads('frozen'),
  data: writer.tasks([1, 2, 3]),
  advantage: { kind: 'group' },
  // Every token counts the same whatever the length of its completion: shares within a completion reward short ones, and the writer
  // learns to name one thing and say no more.
  objective: { kind: 'policy_gradient', clip_low: 0.2, clip_high: 0.2, normalise: 'dr_grpo' },
  samples: { every: 50, tasks: 8 },
  checkpoints: { every: 50, keep: 2 },
}
