// The twin of flow-grpo.jsonnet on the playground: the playground's tiny editor, on a laptop.
//
//   retouch train recipes/qwen-image-2/flow-grpo-playground.jsonnet
local playground = import '../lib/playground.libsonnet';
local qwen = import '../lib/qwen_image_edit.libsonnet';

qwen.flow_grpo(
  world={
    model: playground.model,
    tasks: playground.tasks(complexity=[2, 3]),
    judge: playground.judge,
  },
  sizes={
    name: 'qwen-image-2-flow-grpo-playground',
    steps: 100,
    tasks_per_step: 8,
    group_size: 12,
    learning_rate: 1e-3,
    ranks: 1,
    rank: 64,
    num_steps: 6,
    chunk: 96,
    microbatch: 96,
    gradient_checkpointing: false,
    eval_every: 50,
    eval_tasks: 128,
    eval_steps: 10,
  },
) { rollout+: { guidance_scale: 1 } }
