// Flow-GRPO on a text-to-image model: all steps except the last are stochastic, with a KL to the base model. A full-size recipe and
// its twin pass their own world (model, tasks, judge) and sizes; everything else is the same.
//
// Values: Flow-GRPO's published settings for Stable Diffusion 3.5 (arXiv 2505.05470 and its code): 10 steps with noise level 0.7
// and guidance, clip range 1e-4, standard deviation over the whole step, advantages up to 5, two optimizer steps per rollout, and a
// moving average of the weights with decay 0.9 that is updated every 8 optimizer steps.
local objectives = import 'objectives.libsonnet';
local sampling = import 'sampling.libsonnet';

{
  flow_grpo(world, sizes):: {
    name: sizes.name,
    steps: sizes.steps,
    tasks_per_step: sizes.tasks_per_step,
    group_size: sizes.group_size,
    learning_rate: sizes.learning_rate,
    ranks: sizes.ranks,
    minibatches: 2,
    microbatch: sizes.microbatch,
    policy: {
      kind: 'denoising',
      model: world.model,
      train: { kind: 'lora', rank: 32, alpha: 64 },
      ema: { decay: 0.9, every: 8 },
      gradient_checkpointing: sizes.gradient_checkpointing,
    },
    rollout: {
      num_steps: sizes.num_steps,
      transition: sampling.sde(0.7),
      window: { mode: 'all' },
      guidance_scale: sizes.guidance_scale,
      chunk: sizes.chunk,
    },
    data: world.tasks,
    reward: world.judge,
    advantage: { kind: 'group', scale: 'batch' },
    objective: objectives.grpo(1e-4) + { kl: { kind: 'closed', weight: 0.04 } },
    optimizer: { weight_decay: 1e-4 },
    eval: { every: sizes.every, tasks: sizes.eval_tasks, num_steps: sizes.eval_steps, batch: sizes.eval_batch },
    samples: { every: sizes.every },
    checkpoints: { every: sizes.every },
  },
}
