// The twin of ocr-grpo.jsonnet on the playground: its text-to-image model generates scenes of 6 to 9 objects, and the exact judge
// scores them. The model was trained on scenes of 1 to 4: of 10, it scores 9.9 for 6 objects and 8.0 for 9.
//
//   retouch train recipes/sd3/ocr-grpo-playground.jsonnet
//
// docs/results.md says how far it was run.
local playground = import '../lib/playground.libsonnet';
local sd3 = import '../lib/sd3.libsonnet';

sd3.flow_grpo(
  world={
    model: playground.text_to_image,
    tasks: playground.crowded([6, 7, 8, 9]),
    judge: playground.painting_judge,
  },
  sizes={
    name: 'sd3-ocr-grpo-playground',
    steps: 60,
    tasks_per_step: 8,
    group_size: 12,
    learning_rate: 1e-3,
    ranks: 1,
    microbatch: 96,
    gradient_checkpointing: false,
    num_steps: 5,
    guidance_scale: 1,
    chunk: 96,
    every: 30,
    eval_tasks: 128,
    eval_steps: 6,
    eval_batch: 128,
  },
)
