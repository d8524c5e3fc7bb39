// A vision-language model rewrites prompts for a frozen text-to-image model; the image is scored against the user's prompt. A
// full-size recipe and its twin pass their own world (writer, text-to-image model, tasks, judge) and sizes; everything else is the
// same.
{
  grpo(world, sizes):: {
    name: sizes.name,
    steps: sizes.steps,
    tasks_per_step: sizes.tasks_per_step,
    group_size: sizes.group_size,
    learning_rate: sizes.learning_rate,
    microbatch: sizes.microbatch,
    policy: {
      kind: 'autoregressive',
      model: world.writer,
      train: { kind: 'lora', rank: 32, alpha: 64 },
      gradient_checkpointing: sizes.gradient_checkpointing,
      entropy: true,
    },
    rollout: {
      kind: 'tokens',
      max_new_tokens: sizes.max_new_tokens,
      temperature: sizes.temperature,
      chunk: sizes.chunk,
    },
    renderer: {
      kind: 'prompt',
      model: world.text_to_image,
      num_steps: sizes.num_steps,
      guidance_scale: sizes.guidance_scale,
      batch: sizes.batch,
    },
    data: world.tasks,
    reward: world.judge,
    advantage: { kind: 'group' },
    // Every token has the same weight, whatever the length of its completion. Averages per completion favour short completions.
    objective: { kind: 'policy_gradient', clip_low: 0.2, clip_high: 0.2, normalise: 'dr_grpo' },
  },
}
