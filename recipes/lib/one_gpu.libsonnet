// One GPU: Flow-GRPO-Fast on a LoRA. Two of the first steps are stochastic, and only they are trained. A full-size recipe and its
// twin pass their own world (model, tasks, judge) and sizes; everything else is the same.
//
// Values: the settings that `retouch.Trainer` has on a GPU, with Flow-GRPO's standard deviation over the whole step, two optimizer
// steps for each rollout, and moving average of the weights (arXiv 2505.05470 and its code).
//
// What depends on a GPU's memory and speed is in one_gpu.json, by recipe and card. measurements/rehearsal/cards.py writes it: by
// dry runs it chooses the keys with which a step fits, and as many tasks as a run of 200 steps can have within a day.
local chosen = import 'one_gpu.json';
local objectives = import 'objectives.libsonnet';
local sampling = import 'sampling.libsonnet';

{
  flow_grpo(world, sizes):: {
    name: sizes.name,
    steps: sizes.steps,
    tasks_per_step: 8,
    group_size: sizes.group_size,
    learning_rate: sizes.learning_rate,
    minibatches: 2,
    policy: {
      kind: 'denoising',
      model: world.model,
      train: { kind: 'lora', rank: 32, alpha: 64 },
      ema: { decay: 0.9, every: 8 },
    },
    rollout: sampling.window(
      sizes.num_steps, size=2, high=std.floor(sizes.num_steps / 2), transition=sampling.sde(sizes.noise_level)
    ),
    data: world.tasks,
    reward: world.judge,
    advantage: { kind: 'group', scale: 'batch' },
    objective: objectives.grpo(1e-4),
    optimizer: { weight_decay: 1e-4 },
    eval: { every: sizes.every, tasks: sizes.eval_tasks, num_steps: sizes.eval_steps },
    samples: { every: sizes.every },
    checkpoints: { every: sizes.every },
  },

  // A full-size recipe with the keys of each card. `recipe`: its name, such as 'sd3/one-gpu'.
  full_size(recipe, world, num_steps, eval_steps, noise_level=0.7, learning_rate=3e-4, card='24gb')::
    $.flow_grpo(world, {
      name: std.strReplace(recipe, '/', '-'),
      steps: 200,
      group_size: 8,
      learning_rate: learning_rate,
      num_steps: num_steps,
      noise_level: noise_level,
      every: 50,
      eval_tasks: 32,
      eval_steps: eval_steps,
    }) + {
      policy+: { prompt_embeddings: 'cached', gradient_checkpointing: true },
      card: card,
      local cards = std.get(chosen, recipe, {}),
      cards: { [card]: cards[card].keys for card in std.objectFields(cards) if std.objectHas(cards[card], 'keys') },
    },
}
