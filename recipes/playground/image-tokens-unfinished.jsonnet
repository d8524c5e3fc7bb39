// RL on simple and complex edits, from an image-token model whose demonstrations of complex edits mostly lacked an edit, as
// demonstrations made by a model often do; the judge penalises the missing edit.
//
//   retouch train recipes/playground/image-tokens-unfinished.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.rl('image-tokens-unfinished', 'sc-unfinished', 'sc') {
  steps: 250,
  tasks_per_step: 12,
  group_size: 16,
  learning_rate: 1e-4,
  objective+: { kl+: { weight: 0.25 } },
}
