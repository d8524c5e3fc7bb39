// An IP-Adapter that learns to paint words in the style of a reference: a supervised warm-up, in which now and then no reference is
// shown, and then RL, in which it always is (system B). A full-size run and its twin give their world (model, encoder, tasks, judge)
// and sizes; everything else is the same.
//
// The source's: the adapter (SigLIP, two layers to 128 tokens, attended to in all blocks, scale 1), dropout 0.05, its KL of 0.1
// (which it named and never added), OCR and a vision-language model by two weights, group-relative advantages or batch-relative
// ones, which it calls PPO. Its chain had no noise, so the sampling is Flow-GRPO's for Flux; so is what it does not name.
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

  // Against the other pictures of the same task.
  grpo(world, sizes):: base(world, sizes) {
    rollout: sampling.window(sizes.num_steps, size=sizes.window, high=sizes.high, transition=sampling.sde(world.noise_level)) + {
      guidance_scale: world.guidance_scale,
      chunk: sizes.chunk,
    },
    advantage: { kind: 'group' },
    // The source's 0.2 is for sums over the 65536 numbers of a picture of 512 px; of their mean it is 3e-6.
    objective: objectives.grpo(3e-6) { kl: { kind: 'velocity', weight: sizes.kl } },
  },

  // Against all pictures of the step: what the source calls PPO. It has no critic.
  ppo(world, sizes):: self.grpo(world, sizes) { advantage: { kind: 'batch' } },

  // Two copies of the adapter beside it: the old policy, which makes the pictures, and the reference.
  nft(world, sizes):: base(world, sizes) {
    rollout: sampling.pictures(sizes.num_steps) { guidance_scale: world.guidance_scale, chunk: sizes.chunk },
    advantage: { kind: 'group' },
    objective: objectives.nft { reference_weight: 1e-4 },
  },

  // `--ocr_weight` and `--vlm_weight`. What the reader read counts, and not how sure it was of it. `column` is of whoever looks at
  // the rest of the picture: a vision-language model, or what stands in for it under another `name`.
  two_weights(ocr, looks, column, ocr_weight=0.5, vlm_weight=0.5, name='vlm'):: {
    kind: 'several',
    rewards: { ocr: ocr, [name]: looks },
    combine: '%g * ocr/correctness + %g * %s/%s' % [ocr_weight, vlm_weight, name, column],
  },
}
