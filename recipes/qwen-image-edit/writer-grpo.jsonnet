// Qwen2.5-VL-7B sees a photograph and an instruction with eight edits and writes how to make them; the frozen Qwen-Image-Edit is
// conditioned on the writer's hidden states of the whole dialogue. 8 GPUs with 80 GB or more, one rank each (the source used
// H200); `retouch doctor RECIPE --device h200` plans the memory of each GPU.
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo.jsonnet --set data.allow_test_sets=true
//
// or, with accelerate as the launcher:
//
//   accelerate launch --config_file recipes/accelerate/zero2.yaml -m retouch.cli train RECIPE ...
//
// **Complex-Edit has only test splits** (and a non-commercial licence), so training on it, as the source does, is refused unless
// `data.allow_test_sets` is true, and the run records the key. The data set for training is UCSC-VLAA/GPT-Image-Edit-1.5M, which
// has complex instructions of this kind; `retouch data convert gpt-image-edit DIR` converts it for
// `data: { kind: 'folder', path: DIR }`.
//
// From the source's documents: the model, the data and its complexity, 8 completions per task, 16 samples per step (1 completion at
// a time, twice, on 8 GPUs), the LoRA, the learning rate, ZeRO-2, 3 passes, a checkpoint every 500 steps, the judge's weights and
// its three answers. The documents do not specify the denoising steps, guidance, completion length and clip range. Where they leave
// the choice to TRL, writer-grpo-published has TRL's values. The source's later scripts, for the editor of 2509, are
// writer-grpo-2509-published and writer-grpo-full-2509-published. According to our measurements, two variants are better: in
// writer-grpo-frozen the editor's own encoder reads the response; writer-grpo-identity, **the recommended variant**, also rewards
// identity preservation.
//
// A healthy run. In the trial step the ratio is 1 within 1e-2 (16 bits) and the weights change; otherwise the run stops.
// - `reward/missing_fraction` is near 0. Check this first: if the judge does not answer, the scores of these samples are missing;
//   they are never replaced by a number.
// - `group/zero_std_fraction` is below a half. With two groups per step, all curves are noisy: look at means over 50 steps or more.
// - `reward/mean` rises over hundreds of steps, `reward/alignment` first; if `reward/identity` falls meanwhile, the writer has
//   learned to repaint the image. `policy/loss` is about 0 throughout and has no meaning.
// - `completion/length` converges and `completion/cut_off_fraction` is near 0; `policy/entropy` falls slowly, but not to 0.
// - `memory/peak_gb` stays within the plan of `retouch doctor RECIPE --device h200`.
// - The held-out reward rises with the training reward; if it does not, stop the run.
// **Claims of the source, none of them measured here**: the reward starts at about 0.5 (which its reward also returns if the judge
// fails), is 0.6 to 0.7 in the first pass, 0.7 to 0.8 in the second and 0.8 to 0.9 at the end; a thousand samples take 6 to 8 hours
// on 8 H200, and the whole data set 24 to 48 hours; each GPU uses some 75 GB.
local judges = import '../lib/judges.libsonnet';
local writer = import '../lib/writer_grpo.libsonnet';

writer.grpo(
  world={
    writer: { kind: 'qwen-vl', path: 'Qwen/Qwen2.5-VL-7B-Instruct', dtype: 'bfloat16' },
    editor: { kind: 'qwen-image-edit', path: 'Qwen/Qwen-Image-Edit', dtype: 'bfloat16' },
    tasks: { kind: 'complex-edit', split: 'test_real', complexity: '8' },
    judge: judges.alignment_quality(judges.endpoint('gpt-4o')),
  },
  sizes={
    name: 'writer-grpo',
    tasks_per_step: 2,
    group_size: 8,
    learning_rate: 1e-5,
    microbatch: 1,
    gradient_checkpointing: true,
    max_new_tokens: 512,
    encoder: 'policy',
    num_steps: 20,
    guidance_scale: 4.0,
    batch: 2,
  },
) {
  passes: 3,
  ranks: 8,
  sharding: 'zero2',
  eval: { every: 100, tasks: 48, batch: 2 },
  samples: { every: 100 },
  checkpoints: { every: 500, keep: 2 },
}
