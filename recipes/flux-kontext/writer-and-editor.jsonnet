// A vision-language model rewrites the instruction, FLUX.1-Kontext edits the photograph, and both learn from the same images: the
// form of PromptRL (https://github.com/G-U-N/UniRL, branch prompt_rl), whose README reports for Kontext an EditReward of 1.19 before
// training, 1.36 with the writer alone and 1.43 with both. These figures are not measured here.
//
//   retouch train recipes/flux-kontext/writer-and-editor.jsonnet --set data.path=DIR
//   retouch train recipes/flux-kontext/writer-and-editor.jsonnet --set data.path=DIR --set text_to_image=null     # the writer alone
//
// DIR contains photographs and a metadata.jsonl with an instruction for each; docs/guides/photos.md has all steps. One GPU with
// 80 GB: `retouch doctor recipes/flux-kontext/writer-and-editor.jsonnet --device h100` shows the memory of each stage.
//
// Ours: the models' sizes, LoRA of rank 32 for both, groups of 8 prompts, 512 px, the reward (PickScore and preservation of the
// source). From Flow-GRPO's code for FLUX.1-Kontext: 6 steps, guidance 2.5, noise level 0.9.
//
// A healthy run. In the trial step both ratios are 1 within 1e-2 (16 bits).
// - `reward/fault_fraction` and `completion/cut_off_fraction` fall soon: a prompt that does not end within 160 tokens is not edited.
// - `policy/kl` stays small, and the texts under the samples still say what the instruction says. A writer can gain reward by asking
//   for another, more beautiful picture; preservation counts against this.
// - Compare with the writer alone, from the same seed, before you believe that both are better.
// This recipe has not been run on a GPU.
local enhancer = import '../lib/prompt_enhancer.libsonnet';
local objectives = import '../lib/objectives.libsonnet';
local photos = import '../lib/photos.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

enhancer.grpo(
  world={
    writer: { kind: 'qwen-vl', path: 'Qwen/Qwen2.5-VL-7B-Instruct', dtype: 'bfloat16' },
    text_to_image: {
      kind: 'flux-kontext',
      path: 'black-forest-labs/FLUX.1-Kontext-dev',
      size: [512, 512],
      dtype: 'bfloat16',
      guidance: 2.5,
    },
    tasks: photos.tasks('photos', held_out=0.2),
    judge: photos.preferred(device='cpu'),
  },
  sizes={
    name: 'flux-kontext-writer-and-editor',
    steps: 200,
    tasks_per_step: 4,
    group_size: 8,
    learning_rate: 1e-5,
    microbatch: 4,
    gradient_checkpointing: true,
    max_new_tokens: 160,
    temperature: 1.0,
    chunk: 8,
    num_steps: 28,
    guidance_scale: 1.0,
    batch: 8,
  },
) {
  text_to_image: {
    train: { kind: 'lora', rank: 32, alpha: 64 },
    objective: objectives.grpo(1e-5),
    rollout: sampling.window(num_steps=6, size=2, high=3, transition=sampling.sde(0.9)),
    learning_rate: 1e-4,
    microbatch: 2,
    gradient_checkpointing: true,
  },
  eval: { every: 50, tasks: 16, batch: 8, best_of_k: 4 },
  samples: { every: 50, tasks: 4 },
  checkpoints: { every: 50 },
}
