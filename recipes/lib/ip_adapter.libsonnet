// An IP-Adapter that learns to render words in the style of a reference image: a supervised warm-up with dropout of references,
// then RL without dropout (system B). A full-size recipe and its twin define their world (model, encoder, tasks, judge) and sizes;
// everything else is the same.
//
// From the source: the adapter (SigLIP, two layers to 128 tokens, attention in all blocks, scale 1), dropout 0.05, a KL weight of
// 0.1 (which the source defined but never used), OCR and a vision-language model with two weights, group-relative advantages or
// batch-relative ones, which it calls PPO. Its sampling had no noise, so sampling, and everything that the source does not specify,
// is that of Flow-GRPO for Flux.
local objectives = import 'objectives.libsonnet';
local sampling = import 'sampling.libsonnet';

{
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

  // Relative to the other images of the same task.
  grpo(world, sizes):: base(world, sizes) {
    rollout: sampling.window(sizes.num_steps, size=sizes.window, high=sizes.high, transition=sampling.sde(world.noise_level)) + {
      guidance_scale: world.guidance_scale,
      chunk: sizes.chunk,
    },
    advantage: { kind: 'group' },
    // The source's 0.2 is for sums over the 65536 values of an image of 512 px; for their mean, that is 3e-6.
    objective: objectives.grpo(3e-6) { kl: { kind: 'velocity', weight: sizes.kl } },
  },

  // Relative to all images of the step: what the source calls PPO. It has no critic.
  ppo(world, sizes):: self.grpo(world, sizes) { advantage: { kind: 'batch' } },

  // Two additional copies of the adapter: the old policy, which samples, and the reference.
  nft(world, sizes):: base(world, sizes) {
    rollout: sampling.pictures(sizes.num_steps) { guidance_scale: world.guidance_scale, chunk: sizes.chunk },
    advantage: { kind: 'group' },
    objective: objectives.nft { reference_weight: 1e-4 },
  },

  // What the scripts of the source's repository have in common. Half of the steps train, from the first one on; the published
  // guidance is an input of the model.
  published_world(world):: world {
    model+: { guidance: 3.5 },
    judge+: { combine: '0.7 * ocr/correctness + 0.3 * vlm/quality' },
  },
  published_sizes:: { steps: 10000, tasks_per_step: 8, num_steps: 20, window: 10, high: 10, eval_steps: 20 },

  // `--ocr_weight` and `--vlm_weight`. The OCR score counts the recognised text, not its confidence. `column` is the score of the
  // rest of the image: by a vision-language model, or by another reward under another `name`.
  two_weights(ocr, looks, column, ocr_weight=0.5, vlm_weight=0.5, name='vlm'):: {
    kind: 'several',
    rewards: { ocr: ocr, [name]: looks },
    combine: '%g * ocr/correctness + %g * %s/%s' % [ocr_weight, vlm_weight, name, column],
  },
}
