// A control for image-tokens-distractors: continued supervised learning on the data of the base model, with single edits only, and with as
// many samples.
//
//   retouch train recipes/playground/image-tokens-distractors-supervised.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';
local playground = import '../lib/playground.libsonnet';

emu3.supervised('image-tokens-distractors-supervised', 's-distractors', 's') {
  steps: 600,
  learning_rate: 1e-4,
  data: playground.tasks({ '1': 1 }, filler=0.25, impossible=0.5),
}
