// An IP-Adapter that learns to render words in the style of a reference image: a supervised warm-up with dropout of references,
// then RL without dropout. A full-size recipe and its twin pass their own world (model, encoder, tasks, judge) and sizes;
// everything else is the same.
//
// From the source: the adapter (SigLIP, two layers to 128 tokens, attention in all blocks, scale 1), dropout 0.05, a KL weight of
// 0.1 (which the source defined but never used), a weighted sum of an OCR score and a score by a vision-language model, and
// advantages relative to the group, or relative to the batch, which the source calls PPO. The source sampled without noise, so
// sampling, and everything that the source does not specify, is that of Flow-GRPO for Flux.
local objectives = import 'objectives.libsonnet';
local sampling = import 'sampling.libsonnet';

{
  // The averaged weights are evaluated and exported. The source averages too; these values are those of Flow-GRPO, and those of the
  // source's scripts are in the `-published` recipes.
  ema:: { decay: 0.9, every: 8 },

  local base(world, sizes) = {
    name: sizes.name,
    tasks_per_step: sizes.tasks_per_step,
    group_size: sizes.group_size,
    learning_rate: sizes.learning_rate,
    ranks: sizes.ranks,
    sharding: if sizes.ranks > 1 then 'zero2' else null,
    microbatch: sizes.microbatch,
    policy: {
      kind: 'denoising',
      model: world.model,
      train: {
        kind: 'ip-adapter',
        encoder: world.encoder,
        tokens: sizes.tokens,
        projection: 'mlp',
        blocks: world.blocks,
        scale: 1,
        dropout: 0.05,
        [if 'lora' in sizes then 'lora']: sizes.lora,
      },
      gradient_checkpointing: sizes.gradient_checkpointing,
      [if 'ema' in sizes then 'ema']: sizes.ema,
    },
    data: world.tasks,
    reward: world.judge,
    optimizer: { weight_decay: 1e-4 },
    phases: [
      {
        name: 'warm-up',
        steps: sizes.warmup_steps,
        objective: { kind: 'supervised' },
        tasks_per_step: sizes.warmup_tasks,
        group_size: 1,
        learning_rate: sizes.warmup_learning_rate,
      },
      { name: 'rl', steps: sizes.steps },
    ],
    eval: { every: sizes.eval_every, tasks: sizes.eval_tasks, num_steps: sizes.eval_steps, batch: sizes.chunk },
    samples: { every: sizes.eval_every },
    checkpoints: { every: sizes.eval_every },
  },

  // Advantages relative to the other images of the same task.
  grpo(world, sizes):: base(world, sizes) {
    rollout: sampling.window(sizes.num_steps, size=sizes.window, high=sizes.high, transition=sampling.sde(world.noise_level)) + {
      guidance_scale: world.guidance_scale,
      chunk: sizes.chunk,
    },
    advantage: { kind: 'group' },
    // The source's clip range of 0.2 is for log-probabilities summed over the 65536 latent values of an image of 512 px; for their
    // mean, that is 3e-6.
    objective: objectives.grpo(3e-6) { kl: { kind: 'velocity', weight: sizes.kl } },
  },

  // Advantages relative to all images of the step. The source calls this PPO; it has no critic.
  ppo(world, sizes):: self.grpo(world, sizes) { advantage: { kind: 'batch' } },

  // DiffusionNFT holds two additional copies of the adapter: the old policy, which samples, and the reference.
  nft(world, sizes):: base(world, sizes) {
    rollout: sampling.pictures(sizes.num_steps) { guidance_scale: world.guidance_scale, chunk: sizes.chunk },
    advantage: { kind: 'group' },
    objective: objectives.nft { reference_weight: 1e-4 },
  },

  // Settings that all scripts of the source's repository share. The first half of the denoising steps trains; the published
  // guidance is an input of the model. The warm-up learns the ref, with the source as its context and the ref's crop as the style.
  // That crop shows the letters to be painted, so a model can copy them; the other recipes take the crop of another item.
  published_world(world):: world {
    model+: { guidance: 3.5 },
    tasks+: { target: 'ref', reference: 'own' },
    judge+: { combine: '0.7 * ocr/correctness + 0.3 * vlm/quality' },
  },
  published_sizes:: { steps: 10000, tasks_per_step: 8, num_steps: 20, window: 10, high: 10, eval_steps: 20 },

  // The source's options `--ocr_weight` and `--vlm_weight`. The OCR score compares the recognised text; its confidence does not
  // count. `looks` is the reward for the rest of the image (a vision-language model, or another reward under another `name`), and
  // `column` the column of it that counts.
  two_weights(ocr, looks, column, ocr_weight=0.5, vlm_weight=0.5, name='vlm'):: {
    kind: 'several',
    rewards: { ocr: ocr, [name]: looks },
    combine: '%g * ocr/correctness + %g * %s/%s' % [ocr_weight, vlm_weight, name, column],
  },
}
