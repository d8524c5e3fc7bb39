// Beside writer-grpo-frozen-playground: the writer itself reads what it wrote for the editor, with what it has learnt (system A).
//
//   retouch train recipes/qwen-image-edit/writer-grpo-playground.jsonnet
local writer = import '../lib/playground_writer.libsonnet';

(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-grpo-playground',
  renderer: writer.reads('policy'),
}
