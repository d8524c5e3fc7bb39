// The worlds in which IP-Adapters learn to render words: FLUX.1-Fill and Qwen-Image-Edit at full size, and their twins on the signs
// of the playground.
local ip_adapter = import 'ip_adapter.libsonnet';
local judges = import 'judges.libsonnet';

local siglip = 'google/siglip-so400m-patch14-384';
// Image quality, scored by a Qwen2.5-VL that `vllm serve Qwen/Qwen2.5-VL-7B-Instruct` serves on this machine.
local looks = {
  kind: 'aspects',
  judge: judges.endpoint('Qwen/Qwen2.5-VL-7B-Instruct', base_url='http://localhost:8000/v1'),
  aspects: ['quality'],
};
local judge(where) = ip_adapter.two_weights({ kind: 'ocr', where: where }, looks, 'quality');
// Signs whose ink and paper colours are visible only in the reference. The demonstrations of the warm-up have as many wrong letters
// as the demonstrations that the base model was trained on, so only the style can be learned from them. Signs are three times as
// wide as high: 144 px at the height of 48 px that the OCR uses.
local signs = {
  encoder: 'playground',
  tasks: { kind: 'playground-words', count: 100000, wrong_letters: 0.5, style_from_reference: true },
  judge: ip_adapter.two_weights(
    { kind: 'ocr', where: 'box', line_width: 160 }, { kind: 'playground-signs' }, 'style', name='signs'
  ),
};

{
  flux_fill: {
    model: { kind: 'flux-fill', path: 'black-forest-labs/FLUX.1-Fill-dev', size: [512, 512], dtype: 'bfloat16' },
    encoder: siglip,
    blocks: 'all',
    noise_level: 0.8,
    guidance_scale: 1,
    // The reference is the style image of another item: a crop of the item itself would show the letters.
    tasks: { kind: 'triplets', path: 'triplets', reference: 'other' },
    judge: judge('mask'),
  },
  flux_fill_sizes: {
    steps: 1000,
    warmup_steps: 400,
    warmup_tasks: 256,
    tasks_per_step: 16,
    group_size: 16,
    learning_rate: 1e-5,
    warmup_learning_rate: 1e-5,
    kl: 0.1,
    ranks: 8,
    tokens: 128,
    num_steps: 6,
    window: 3,
    high: 3,
    chunk: 16,
    microbatch: 2,
    gradient_checkpointing: true,
    eval_every: 50,
    eval_tasks: 64,
    eval_steps: 28,
  },
  // The data are photographs with an instruction, a target, a reference and the text. The source image must not contain the words,
  // because this model sees all of it.
  qwen: self.flux_fill {
    model: { kind: 'qwen-image-edit', path: 'Qwen/Qwen-Image-Edit', size: [512, 512], dtype: 'bfloat16', vae_slicing: true },
    blocks: 'double',
    noise_level: 1.2,
    guidance_scale: 4,
    tasks: { kind: 'folder', path: 'words' },
    judge: judge('picture'),
  },

  signs: self.flux_fill + signs { model: { kind: 'playground-words' } },
  signs_of_qwen: self.qwen + signs { model: { kind: 'playground', size: [32, 64] } },
  signs_sizes: self.flux_fill_sizes {
    steps: 60,
    warmup_steps: 100,
    warmup_tasks: 32,
    tasks_per_step: 8,
    group_size: 8,
    learning_rate: 5e-4,
    warmup_learning_rate: 2e-3,
    // With the source's weight, the gradient of the KL would be five to ten times the gradient of the reward here.
    kl: 0.003,
    ranks: 1,
    tokens: 4,
    // Without a LoRA, the adapter learned the style in the warm-up, but was not observed to learn letters in 40 steps of RL (with
    // the source's KL weight).
    lora: { kind: 'lora', rank: 32, alpha: 64 },
    chunk: 64,
    microbatch: 64,
    gradient_checkpointing: false,
    eval_every: 50,
    eval_tasks: 150,
    eval_steps: 6,
  },
}
