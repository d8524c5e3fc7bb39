// System A at full size: Qwen2.5-VL-7B sees a photograph and an instruction of eight edits, and writes how to make them; the frozen
// Qwen-Image-Edit draws from the states of the whole dialogue, as the writer itself reads it. 8 GPUs of 80 GB or more, one rank each
// (the source's were H200); `retouch doctor RECIPE --device h200` plans what each holds.
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo.jsonnet --set data.allow_test_sets=true
//
// or, where accelerate is the launcher: accelerate launch --config_file recipes/accelerate/zero2.yaml -m retouch.cli.main train RECIPE ...
//
// **Complex-Edit holds test splits alone** (and its licence is non-commercial), so training on it, as the source does, is refused
// without that key, and the run records it. The data set to train on is UCSC-VLAA/GPT-Image-Edit-1.5M, whose complex instructions
// are of this kind; it is many folders of JSON, of which a metadata.jsonl makes `data: { kind: 'folder', path: DIR }`.
//
// The model, the data and its complexity, 8 completions a task, 16 samples a step (1 completion at once, twice, on 8 GPUs), the LoRA,
// the learning rate, ZeRO-2, 3 passes, a checkpoint each 500 steps, the judge's weights and its three answers are the source's; what
// it leaves open (denoising steps, guidance, length of a completion, clip) is not. Better by what is known here are two siblings: in
// writer-grpo-frozen the editor's own encoder reads; writer-grpo-identity, **the recommended one**, also pays for what was to stay.
//
// A healthy run. Before the first step the ratio is 1 within 1e-2 (16 bits) and weights move, or the run does not begin.
// - `reward/missing_fraction` is near 0. Look there first: a judge that does not answer is missing samples, and never a number.
// - `group/zero_std_fraction` below a half. Two groups a step make every curve rough: look at means over 50 steps and more.
// - `reward/mean` rises over hundreds of steps, `reward/alignment` first; where `reward/identity` falls meanwhile, the writer has
//   learnt to repaint. `policy/loss` is about 0 throughout and says nothing.
// - `completion/length` settles, and `completion/cut_off_fraction` is near 0; `policy/entropy` falls slowly, and not to 0.
// - `memory/peak_gb` stays within what `retouch doctor RECIPE --device h200` says.
// - The held-out reward rises with the training reward; where it does not, stop.
// **Claims of the source, none of them measured here**: the reward begins about 0.5 (which is also the number that its reward gives
// when the judge fails), is 0.6 to 0.7 in the first pass, 0.7 to 0.8 in the second and 0.8 to 0.9 at the end; a thousand samples take
// 6 to 8 hours on 8 H200 and the whole set 24 to 48; a GPU holds some 75 GB.
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
