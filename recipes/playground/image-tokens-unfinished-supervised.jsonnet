// A control for image-tokens-unfinished: continued supervised learning on the data of the base model, with as many samples.
//
//   retouch train recipes/playground/image-tokens-unfinished-supervised.jsonnet
local emu3 = import '../lib/emu3_playground.libsonnet';
local playground = import '../lib/playground.libsonnet';

emu3.supervised('image-tokens-unfinished-supervised', 'sc-unfinished', 'sc') {
  steps: 750,
  learning_rate: 1e-4,
  data: playground.tasks({ '1': 0.75, '2': 0.125, '3': 0.125 }, filler=0.25) + { unfinished: 0.9 },
}
