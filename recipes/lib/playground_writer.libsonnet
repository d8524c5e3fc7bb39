// The playground's writer in front of its editor, for every way to train it.
local playground = import 'playground.libsonnet';

{
  policy: {
    kind: 'autoregressive',
    model: { kind: 'playground-writer' },
    train: { kind: 'lora', rank: 32, alpha: 64 },
  },
  rollout: { kind: 'tokens', max_new_tokens: 32 },
  reads(encoder):: {
    kind: 'response',
    model: playground.model,
    encoder: encoder,
    num_steps: 6,
    batch: 64,
    encoder_batch: 64,
  },
  tasks(complexity, lazy=0):: { kind: 'playground-indirect', complexity: complexity, count: 100000, lazy: lazy },
  reward: playground.judge,
  // Several edits in one instruction: those that the base writer mostly says one of.
  eval: { tasks: 330, complexity: [1, 2, 3], headline: { complexity: ['2', '3'] }, column: 'overall', best_of_k: 4, batch: 110 },
}
