// The text-to-image variant of the TRL writer script with the values of its script (run_8gpu_qwen_image.sh): Qwen2.5-VL-7B writes
// a response to a prompt, and the frozen Qwen-Image is conditioned on the hidden states of the whole dialogue. 16 completions per
// task and 8 tasks per step, DAPO's loss with an upper clip range of 0.28, a LoRA of rank 128, 500 steps. 8 GPUs with 141 GB
// (H200).
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image/writer-grpo-published.jsonnet --set data.path=PROMPTS.jsonl
//
// PROMPTS.jsonl has a `prompt` in each line. The source trains on MMMG in an order from easy to hard, which
// writer-grpo-published-mmmg does. The source's readability score, by a segmentation model, is not included. The source samples 8
// denoising steps, as the name of its run says; guidance and image size are those of writer-grpo.
//
// A healthy run. In the trial step the ratio is 1 within 1e-2 (16 bits) and the weights change; otherwise the run stops.
// - `reward/missing_fraction` is near 0; check this first.
// - `reward/mean` rises over some hundred steps; `completion/length` converges, and `completion/cut_off_fraction` is near 0.
// - The held-out reward rises with the training reward; look at held-out images for text that only the response asks for.
// The source makes no claims about this variant.
local judges = import '../lib/judges.libsonnet';
local writer = import '../lib/writer_grpo.libsonnet';

writer.grpo(
  world={
    writer: { kind: 'qwen-vl', path: 'Qwen/Qwen2.5-VL-7B-Instruct', dtype: 'bfloat16' },
    editor: { kind: 'qwen-image', path: 'Qwen/Qwen-Image', size: [1024, 1024], dtype: 'bfloat16' },
    tasks: { kind: 'prompts', path: 'prompts.jsonl', held_out: 64 },
    judge: {
      kind: 'aspects',
      judge: judges.endpoint('gpt-4o'),
      aspects: ['alignment', 'quality'],
      n_evals: 3,
      combine: { alignment: 0.5, quality: 0.5 },
    },
  },
  sizes={
    name: 'qwen-image-writer-grpo-published',
    tasks_per_step: 8,
    group_size: 16,
    learning_rate: 1e-5,
    microbatch: 2,
    gradient_checkpointing: true,
    max_new_tokens: 1024,
    encoder: 'policy',
    num_steps: 8,
    guidance_scale: 4.0,
    batch: 4,
  },
) {
  steps: 500,
  ranks: 8,
  sharding: 'zero2',
  policy+: { train+: { rank: 128, alpha: 256 } },
  objective+: { normalise: 'token', clip_high: 0.28 },
  eval: { every: 50, tasks: 48, batch: 4 },
  samples: { every: 50 },
  checkpoints: { every: 50, keep: 10 },
}
