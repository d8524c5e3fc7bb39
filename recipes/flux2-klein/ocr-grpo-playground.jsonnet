// The twin of ocr-grpo.jsonnet on the playground: its text-to-image model generates scenes of 8 and 9 objects, and the exact judge
// scores them. The run is the same as that of sd3/ocr-grpo-playground.jsonnet, under another name.
//
//   retouch train recipes/flux2-klein/ocr-grpo-playground.jsonnet
local playground = import '../lib/playground.libsonnet';
local sd3 = import '../lib/sd3.libsonnet';

sd3.flow_grpo(
  world={
    model: playground.text_to_image,
    tasks: playground.crowded([8, 9]),
    judge: playground.scene_judge,
  },
  sizes={
    name: 'flux2-klein-ocr-grpo-playground',
    steps: 40,
    tasks_per_step: 8,
    group_size: 12,
    learning_rate: 1e-3,
    ranks: 1,
    microbatch: 96,
    gradient_checkpointing: false,
    num_steps: 5,
    guidance_scale: 1,
    chunk: 96,
    every: 10,
    eval_tasks: 128,
    eval_steps: 6,
    eval_batch: 128,
  },
)
