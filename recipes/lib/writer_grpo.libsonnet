// A vision-language model writes a response for a frozen editor, which is conditioned on the hidden states of the whole dialogue
// (a TRL writer script). A full-size recipe and its twin pass their own world (writer, editor, tasks, judge) and sizes; everything
// else is the same.
{
  grpo(world, sizes):: {
    name: sizes.name,
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
    rollout: { kind: 'tokens', max_new_tokens: sizes.max_new_tokens },
    renderer: {
      kind: 'response',
      model: world.editor,
      encoder: sizes.encoder,
      num_steps: sizes.num_steps,
      guidance_scale: sizes.guidance_scale,
      batch: sizes.batch,
      encoder_batch: sizes.batch,
    },
    data: world.tasks,
    reward: world.judge,
    advantage: { kind: 'group' },
    // Every token has the same weight, whatever the length of its completion. Averages per completion favour short completions, and
    // the policy would learn to name one object and stop.
    objective: { kind: 'policy_gradient', clip_low: 0.2, clip_high: 0.2, normalise: 'dr_grpo' },
  },
}
