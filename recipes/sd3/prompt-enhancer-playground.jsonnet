// The twin of prompt-enhancer.jsonnet on the playground: users describe scenes in words that the text-to-image model does not know,
// and the enhancer rewrites them in words that it knows. The base model mostly stops after the first of several objects.
//
//   retouch train recipes/sd3/prompt-enhancer-playground.jsonnet
local playground = import '../lib/playground.libsonnet';
local enhancer = import '../lib/prompt_enhancer.libsonnet';

enhancer.grpo(
  world={
    writer: { kind: 'playground-enhancer' },
    text_to_image: playground.text_to_image,
    tasks: playground.scenes([1, 2, 3, 4]),
    judge: playground.scene_judge,
  },
  sizes={
    name: 'prompt-enhancer-playground',
    steps: 80,
    tasks_per_step: 8,
    group_size: 8,
    learning_rate: 5e-4,
    microbatch: 64,
    gradient_checkpointing: false,
    max_new_tokens: 26,
    temperature: 1.0,
    chunk: 64,
    num_steps: 4,
    guidance_scale: 1.0,
    batch: 64,
  },
) {
  // The headline is the score of prompts with several objects, of which the base model mostly names one.
  eval: {
    tasks: 400,
    complexity: [1, 2, 3, 4],
    headline: { complexity: ['2', '3', '4'] },
    column: 'overall',
    num_steps: 6,
    best_of_k: 4,
    batch: 200,
  },
  samples: { every: 40, tasks: 8 },
  checkpoints: { every: 40, keep: 2 },
}
