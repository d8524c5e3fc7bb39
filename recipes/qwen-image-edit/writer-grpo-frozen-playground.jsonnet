// The playground's twin of writer-grpo-frozen.jsonnet. Instructions name things as people do who see the picture ("make the circle
// red"); the writer sees it too, and says to the editor which circle. Its base mostly says the first of several edits only.
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
    // The editor's own text encoder reads what was written, and stands still.
    encoder: 'frozen',
    num_steps: 6,
    guidance_scale: 1.0,
    batch: 64,
  },
) {
  steps: 100,
  // Several edits in one instruction: those that the base writer mostly says one of.
  eval: { tasks: 330, complexity: [1, 2, 3], headline: { complexity: ['2', '3'] }, column: 'overall', best_of_k: 4, batch: 110 },
  samples: { every: 50, tasks: 8 },
  checkpoints: { every: 50, keep: 2 },
}
