// A control for writer-grpo-frozen-playground: continued supervised learning on the data of the base model, with as many samples.
//
//   retouch train recipes/playground/writer-supervised.jsonnet
local playground = import '../lib/playground.libsonnet';

(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-supervised',
  tasks_per_step: 64,
  group_size: 1,
  data: playground.indirect({ '1': 2, '2': 1, '3': 1 }, incomplete=0.85),
  objective: { kind: 'sft' },
}
