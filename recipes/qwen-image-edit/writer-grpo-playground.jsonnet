// The playground's twin of a writer in front of a frozen editor: instructions say things in words that the editor does not know, and
// name them by where they stand; the writer sees the picture and says it in the editor's words.
//
//   retouch train recipes/qwen-image-edit/writer-grpo-playground.jsonnet
local playground = import 'lib/playground.libsonnet';

{
  name: 'writer-grpo-playground',
  steps: 60,
  tasks_per_step: 8,
  group_size: 8,
  learning_rate: 1e-3,
  microbatch: 64,
  policy: {
    kind: 'autoregressive',
    model: { kind: 'playground-writer' },
    train: { kind: 'lora', rank: 32, alpha: 64 },
    entropy: true,
  },
  rollout: { kind: 'tokens', max_new_tokens: 24 },
  // The editor's own text encoder reads what was written, and stands still.
  renderer: { kind: 'response', model: playground.model, encoder: 'frozen', num_steps: 6, batch: 64, encoder_batch: 64 },
  data: { kind: 'playground-indirect', complexity: [1], count: 100000 },
  reward: playground.judge,
  advantage: { kind: 'group' },
  objective: { kind: 'policy_gradient', clip_low: 0.2, clip_high: 0.2 },
  eval: { tasks: 300, complexity: [1], column: 'overall', batch: 100 },
  samples: { every: 30, tasks: 8 },
  checkpoints: { every: 30, keep: 2 },
}
