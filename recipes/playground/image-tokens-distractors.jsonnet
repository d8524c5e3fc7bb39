// RL on simple and complex edits, from an image-token model whose demonstrations had one edit each. Half of their instructions also
// requested edits of things that are not in the image, so the model has seen long instructions, but never made two edits at once.
// In the reward, the preservation of the source image (IP) counts twice, so RL has no shortcut that changes other objects.
//
//   retouch train recipes/playground/image-tokens-distractors.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';
local playground = import '../lib/playground.libsonnet';

emu3.rl('image-tokens-distractors', 's-distractors', 'sc') {
  steps: 200,
  tasks_per_step: 12,
  group_size: 16,
  learning_rate: 3e-4,
  data: playground.tasks({ '1': 0.5, '2': 1, '3': 1.5 }, filler=0.25),
  advantage: { kind: 'group', scale: 'none', clip: null },
  objective+: { kl+: { weight: 0.005 } },
  reward+: { combine: 'gmean(IF, IP, IP, PQ)' },
}
