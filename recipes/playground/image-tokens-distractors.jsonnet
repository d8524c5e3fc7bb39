// RL on simple and complex edits, from an image-token model whose demonstrations had one edit each. Half of their instructions also
// requested edits of things that are not in the image, so the model has seen long instructions, but never made two edits at once.
// In the reward, the preservation of the source image (IP) counts twice, so RL has no shortcut that changes other objects.
//
//   retouch train recipes/playground/image-tokens-distractors.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.rl('image-tokens-distractors', 's-distractors', 'sc') {
  steps: 100,
  tasks_per_step: 12,
  group_size: 16,
  advantage: { kind: 'group', scale: 'none', clip: null },
  reward+: { combine: 'gmean(IF, IP, IP, PQ)' },
}
