// The playground's twin of writer-grpo-frozen.jsonnet. The instructions can only be understood together with the image ("make the
// circle red"); the writer sees the image and tells the editor which circle is meant. The base model mostly names only the first of
// several edits.
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
    // The frozen text encoder of the editor reads the response.
    encoder: 'frozen',
    num_steps: 6,
    guidance_scale: 1.0,
    batch: 64,
  },
) {
  steps: 100,
  // The headline is the score of instructions with several edits, of which the base model mostly names one.
  eval: { tasks: 330, complexity: [1, 2, 3], headline: { complexity: ['2', '3'] }, column: 'overall', best_of_k: 4, batch: 110 },
  samples: { every: 50, tasks: 8 },
  checkpoints: { every: 50, keep: 2 },
}
