// The twin of one-gpu.jsonnet on the playground: its text-to-image model generates scenes of 8 and 9 objects, and the exact judge
// scores them.
//
//   retouch train sd3/one-gpu-playground
//
// A healthy run. The mean held-out score rises from 8.36 to 8.61 within 40 steps; the autoencoder limits it to 9.15.
local one_gpu = import '../lib/one_gpu.libsonnet';
local playground = import '../lib/playground.libsonnet';

one_gpu.flow_grpo(
  world={ model: playground.text_to_image, tasks: playground.crowded([8, 9]), judge: playground.scene_judge },
  sizes={
    name: 'sd3-one-gpu-playground',
    steps: 40,
    group_size: 12,
    learning_rate: 1e-3,
    num_steps: 6,
    noise_level: 0.7,
    every: 10,
    eval_tasks: 128,
    eval_steps: 6,
  },
) + { microbatch: 96, rollout+: { chunk: 96, guidance_scale: 1 } }
