// Qwen2-VL-7B rewrites prompts that are hard for image models, Stable Diffusion 3 Medium generates the images, and CLIP compares
// them with the user's prompt. Three GPUs: the writer on the first, Stable Diffusion on the second, CLIP on the third. They mostly
// work in turn, so a single GPU with 80 GB is enough too: --set devices=null
//
//   retouch train recipes/sd3/prompt-enhancer.jsonnet
//
// To use the second to fourth GPU of a machine, set CUDA_VISIBLE_DEVICES=1,2,3; cuda:0 is then the first of these.
//
// From the source: the models, 100 new tokens, temperature 0.7, the kinds of prompts, the reward on the original prompt, and the
// three devices. The source specifies no learning rate, number of steps or group size. Its limit of 85 % of a GPU's memory and its
// clearing of the cache every 5 rounds are `devices.memory_fraction` and `devices.empty_cache_every` here, which are off (see
// docs/troubleshooting.md).
//
// A healthy run. In the trial step the ratio is 1 within 1e-2 (16 bits) and the weights change; otherwise the run stops.
// - `reward/clip/similarity` is between 0.2 and 0.4, the usual range of ViT-B/32, so a gain of 0.01 is relevant.
// - `reward/fault_fraction` and `completion/cut_off_fraction` fall soon: a prompt that does not end within 100 tokens is not
//   rendered.
// - `reward/clip/truncated` is 0: the prompts are far shorter than the 77 tokens that CLIP reads.
// - `reward/quality/total` is only for information. If it rises and the similarity does not, the writer has learned to add "4k".
// - `group/zero_std_fraction` is 0; otherwise the temperature is too low for this writer.
// - Look at held-out images: CLIP recognises colours and objects well, but counts and positions badly.
// **Claims of the source, none of them measured here**: rewards of 0.74 to 0.90, which the source's page calls dummies, on the
// scale (cosine + 1) / 2, where images of the untrained policy have about 0.63; and 4.3 to 5 of 5 points of prompt quality before
// any training.
local enhancer = import '../lib/prompt_enhancer.libsonnet';

enhancer.grpo(
  world={
    writer: { kind: 'qwen-vl', path: 'Qwen/Qwen2-VL-7B-Instruct', dtype: 'bfloat16' },
    text_to_image: {
      kind: 'sd3',
      path: 'stabilityai/stable-diffusion-3-medium-diffusers',
      size: [1024, 1024],
      dtype: 'float16',
    },
    tasks: { kind: 'prompts', path: 'recipes/sd3/challenging.txt', held_out: 24 },
    judge: {
      kind: 'several',
      rewards: { clip: { kind: 'clip', path: 'openai/clip-vit-base-patch32' }, quality: { kind: 'prompt_quality' } },
      combine: { 'clip/similarity': 1 },
    },
  },
  sizes={
    name: 'prompt-enhancer',
    steps: 300,
    tasks_per_step: 8,
    group_size: 8,
    learning_rate: 1e-5,
    microbatch: 8,
    gradient_checkpointing: false,
    max_new_tokens: 100,
    temperature: 0.7,
    chunk: 64,
    num_steps: 28,
    guidance_scale: 7.0,
    batch: 8,
  },
) {
  ranks: 1,
  devices: { policy: 'cuda:0', renderer: 'cuda:1', reward: 'cuda:2' },
  eval: { every: 50, tasks: 24, batch: 24, best_of_k: 4 },
  samples: { every: 50 },
  checkpoints: { every: 50, keep: 2 },
}
