// The playground's twin of writer-grpo-frozen.jsonnet. Instructions name objects as people do who see the image ("make the circle
// red"); the writer sees the image too and tells the editor which circle. The base model mostly names only the first of several
// edits.
//
//   retouch train recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet
local playground = import '../lib/playground.libsonnet';
local writer = import '../lib/writer_grpo.libsonnet';

writer.grpo(
  world={
    writer: { kind: 'playground-writer' },
    editor: playground.model,
    tasks: playground.indirect([1, 2, 3]),
    judge: playground.judge,
  },
  sizes={
    name: 'writer-grpo-frozen-playground',
    tasks_per_step: 8,
    group_size: 8,
    learning_rate: 5e-4,
    microbatch: 64,
    gradient_checkpointing: false,
    max_new_tokens: 32,
    // The editor's own, frozen text encoder reads the response.
    encoder: 'frozen',
    num_steps: 6,
    guidance_scale: 1.0,
    batch: 64,
  },
) {
  steps: 100,
  // Several edits in one instruction, of which the base model mostly names one.
  eval: { tasks: 330, complexity: [1, 2, 3], headline: { complexity: ['2', '3'] }, column: 'overall', best_of_k: 4, batch: 110 },
  samples: { every: 50, tasks: 8 },
  checkpoints: { every: 50, keep: 2 },
}
