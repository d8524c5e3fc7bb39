// Flow-GRPO's OCR recipe: Stable Diffusion 3.5 Medium learns to render the words in double quotes in its prompt, scored by an OCR
// model. 32 GPUs, 48 groups of 24 images of 512 px per step.
//
//   retouch launch --nproc 8 recipes/sd3/ocr-grpo.jsonnet --set data.path=LIST.txt
//
// (32 ranks are four machines with 8 GPUs; the rows of a step can also be divided by 8, 16 and 24 ranks.) LIST.txt has one prompt
// per line; a line without words in double quotes is refused with its number before anything is loaded. The source's test list is
// for evaluation only.
//
// Values from the code and paper of the source: 10 steps (40 in evaluation), guidance 4.5, noise level 0.7, KL weight 0.04, clip
// range 1e-4, learning rate 3e-4, LoRA of rank 32. Different here: the dtype is bfloat16, without loss scaling; and correctness
// counts all text in the image, so additional words lower the score.
//
// A healthy run. In the trial step the ratio is 1 within 1e-2 (16 bits) and the weights change; otherwise the run stops.
// - `reward/correctness` starts between 0.4 and 0.6 and changes within 100 steps. If it is 0 from the start, the OCR finds no text:
//   look at the images.
// - `reward/confidence` is only for information: a clearly rendered wrong word has a high confidence.
// - `policy/kl` stays small and rises slowly; if it jumps, the images have changed abruptly.
// - `group/zero_std_fraction` rises when easy prompts are solved in all 24 images; nothing is learned from such groups.
// - Look at held-out images: text that the OCR reads well need not look good. `watch` measures more images than you can look at.
// **Claims of the source, none of them measured here**: correctness from 0.59 to 0.92; 0.90 after about 1000 steps, in 16 hours on
// 24 GPUs.
local sd3 = import '../lib/sd3.libsonnet';

sd3.flow_grpo(
  world={
    model: { kind: 'sd3', path: 'stabilityai/stable-diffusion-3.5-medium', size: [512, 512], dtype: 'bfloat16' },
    tasks: { kind: 'prompts', path: 'words.txt', held_out: 0.05 },
    judge: { kind: 'ocr', where: 'picture', combine: { correctness: 1 } },
  },
  sizes={
    name: 'sd3-ocr-grpo',
    steps: 1000,
    tasks_per_step: 48,
    group_size: 24,
    learning_rate: 3e-4,
    ranks: 32,
    microbatch: 9,
    gradient_checkpointing: false,
    num_steps: 10,
    guidance_scale: 4.5,
    chunk: 9,
    every: 20,
    eval_tasks: 512,
    eval_steps: 40,
    eval_batch: 16,
  },
)
