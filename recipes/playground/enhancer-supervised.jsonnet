// A control for prompt-enhancer-playground: continued supervised learning on the data of the base model, with as many samples.
//
//   retouch train recipes/playground/enhancer-supervised.jsonnet
local playground = import '../lib/playground.libsonnet';

(import '../sd3/prompt-enhancer-playground.jsonnet') {
  name: 'enhancer-supervised',
  tasks_per_step: 64,
  group_size: 1,
  data: playground.scenes([1, 2, 3, 4], incomplete=0.8),
  objective: { kind: 'sft' },
}
