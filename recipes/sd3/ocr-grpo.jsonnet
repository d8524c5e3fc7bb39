// Flow-GRPO's OCR recipe: Stable Diffusion 3.5 Medium learns to write the words that its prompt puts between double quotes, read by
// an OCR model. 32 GPUs, 48 groups of 24 pictures of 512 px a step.
//
//   retouch launch --nproc 8 recipes/sd3/ocr-grpo.jsonnet --set data.path=LIST.txt
//
// (32 ranks are four such machines; 8, 16 and 24 share the steps too.) LIST.txt has a prompt a line; a line without words between
// double quotes is refused by its number before anything loads. The source's test list is for judging alone.
//
// The source's values, of its code and paper: 10 steps and 40 in evaluation, guidance 4.5, noise 0.7, KL 0.04, clip 1e-4, learning
// rate 3e-4, LoRA of rank 32. Different here: 16 bits are bfloat16, without a loss scale; and correctness counts what was read in
// the whole picture, so words beside the one that was asked for cost.
//
// A healthy run. Before the first step the ratio is 1 within 1e-2 (16 bits) and weights move, or the run does not begin.
// - `reward/correctness` starts between 0.4 and 0.6 and moves within 100 steps. At 0 from the start the reader finds nothing: look.
// - `reward/confidence` is for looking at: a clearly written wrong word has a high one.
// - `policy/kl` stays small and rises slowly; where it jumps, so did the pictures.
// - `group/zero_std_fraction` rises as easy prompts are solved in all 24 pictures, and they then teach nothing.
// - Look at held-out pictures: what an OCR reads well need not look well. `watch` measures more than one can look at.
// **Claims of the source, none of them measured here**: correctness from 0.59 to 0.92; 0.90 after about 1000 steps, which took 16
// hours on 24 GPUs.
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
