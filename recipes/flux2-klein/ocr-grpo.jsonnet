// Flow-GRPO's OCR recipe on FLUX.2-klein: the 4B base model learns to render the words in double quotes in its prompt, scored by an
// OCR model. 8 GPUs with 80 GB, 16 groups of 24 images of 512 px per step.
//
//   retouch launch --nproc 8 recipes/flux2-klein/ocr-grpo.jsonnet --set data.path=LIST.txt
//
// LIST.txt has one prompt per line; a line without words in double quotes is refused with its number before anything is loaded.
// With data that have images (`data.kind: 'folder'`) the same model edits them; the image tokens make its sequences longer.
//
// The values are Flow-GRPO's for Stable Diffusion 3.5 (recipes/sd3/ocr-grpo.jsonnet) with the guidance of FLUX.2's own pipeline, 4.
// This recipe was not measured on FLUX.2. The distilled model (FLUX.2-klein-4B) samples without guidance: for it, set
// `rollout.guidance_scale=1`, `rollout.num_steps=4` and `eval.num_steps=4`.
//
// A healthy run looks like that of recipes/sd3/ocr-grpo.jsonnet.
local sd3 = import '../lib/sd3.libsonnet';

sd3.flow_grpo(
  world={
    model: { kind: 'flux2-klein', path: 'black-forest-labs/FLUX.2-klein-base-4B', size: [512, 512], dtype: 'bfloat16' },
    tasks: { kind: 'prompts', path: 'words.txt', held_out: 0.05 },
    judge: { kind: 'ocr', where: 'picture', combine: { correctness: 1 } },
  },
  sizes={
    name: 'flux2-klein-ocr-grpo',
    steps: 1000,
    tasks_per_step: 16,
    group_size: 24,
    learning_rate: 3e-4,
    ranks: 8,
    microbatch: 3,  // divides the 9 steps that are trained of each image and the chunk, so nothing is padded
    gradient_checkpointing: true,
    num_steps: 10,
    guidance_scale: 4,
    chunk: 12,
    every: 20,
    eval_tasks: 256,
    eval_steps: 50,
    eval_batch: 16,
  },
)
