// Flow-GRPO-Fast with Qwen-Image-Edit's classes. A full-size recipe and its twin pass their own world (model, tasks, judge) and
// sizes; everything else is the same.
//
// Values: Flow-GRPO's published settings for Qwen-Image-Edit (arXiv 2505.05470 and its code): 10 steps, of which 2 of the first 5
// are stochastic, guidance 4, global standard deviation, no KL.
local objectives = import 'lib/objectives.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

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
      train: { kind: 'lora', rank: sizes.rank, alpha: 2 * sizes.rank },
      gradient_checkpointing: sizes.gradient_checkpointing,
      [if 'compile' in sizes then 'compile']: sizes.compile,
    },
    rollout: sampling.window(sizes.num_steps, size=2, high=5, transition=sampling.sde(1.2)) + {
      guidance_scale: 4,
      chunk: sizes.chunk,
    },
    data: world.tasks,
    reward: world.judge,
    advantage: { kind: 'group', scale: 'batch' },
    objective: objectives.grpo(1e-5),
    optimizer: { weight_decay: 1e-4 },
    eval: { every: sizes.eval_every, tasks: sizes.eval_tasks, num_steps: sizes.eval_steps, batch: sizes.chunk },
    samples: { every: sizes.eval_every },
    checkpoints: { every: sizes.eval_every },
  },
}
