// The twin of ocr-grpo.jsonnet on the playground: its text-to-image model generates scenes of 8 and 9 objects, and the exact judge
// scores them. The model was trained on scenes of 1 to 4: 9 % of these scenes are exact, and the mean score is 8.36 of 10.
//
//   retouch train recipes/sd3/ocr-grpo-playground.jsonnet
//
// A healthy run. Of 128 held-out scenes, 9 % are exact before and 14 % after 40 steps, and the mean score rises from 8.36 to 8.60;
// the autoencoder limits it to 9.15. playground/crowded-grpo.jsonnet is the same with a tenth of the KL weight.
local playground = import '../lib/playground.libsonnet';
local sd3 = import '../lib/sd3.libsonnet';

sd3.flow_grpo(
  world={
    model: playground.text_to_image,
    tasks: playground.crowded([8, 9]),
    judge: playground.scene_judge,
  },
  sizes={
    name: 'sd3-ocr-grpo-playground',
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
