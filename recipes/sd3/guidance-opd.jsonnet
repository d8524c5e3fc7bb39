// Stable Diffusion 3.5 Medium learns its own guidance, so that sampling needs one pass of the model for a step instead of two: one
// GPU with 16 GB or more, LoRA of rank 32, 64 images of 512 px per step, and no judge in training.
//
//   retouch train recipes/sd3/guidance-opd.jsonnet
//
// On-policy distillation (Flow-OPD, arXiv 2605.08063): the policy samples without guidance, and in each state that it reaches it
// learns the velocity of the same model with guidance 4.5 and without the adapter. The OCR reward is only measured: the prompts are
// those of sd3/one-gpu, and `--set data.path=LIST.txt` takes yours. A phase with a policy gradient
// may follow: `phases` in docs/recipes.md.
//
// A healthy run.
// - `policy/loss` falls at once, and later slowly. It is a mean over the latent, so it does not depend on the size of the image.
// - `eval` is without guidance, too. Its score should rise from that of the model without guidance towards that of the teacher.
// This recipe has not been run on a GPU; playground/opd.jsonnet learns with the same objective.
local sampling = import '../lib/sampling.libsonnet';

{
  name: 'sd3-guidance-opd',
  steps: 300,
  tasks_per_step: 64,
  group_size: 1,
  learning_rate: 1e-4,
  microbatch: 8,
  policy: {
    kind: 'denoising',
    model: { kind: 'sd3', path: 'stabilityai/stable-diffusion-3.5-medium', size: [512, 512], dtype: 'bfloat16' },
    train: { kind: 'lora', rank: 32, alpha: 64 },
    ema: { decay: 0.9, every: 8 },
    prompt_embeddings: 'cached',
    gradient_checkpointing: true,
  },
  rollout: sampling.pictures(10) { guidance_scale: 1, chunk: 16 },
  data: { kind: 'prompts', path: 'recipes/words.txt', held_out: 32 },
  reward: { kind: 'ocr', where: 'picture', combine: { correctness: 1 } },
  objective: { kind: 'opd', teachers: { guided: { guidance_scale: 4.5 } } },
  optimizer: { weight_decay: 1e-4 },
  eval: { every: 50, tasks: 32, num_steps: 28, batch: 16 },
  samples: { every: 50 },
  checkpoints: { every: 50 },
}
