// A control of writer-grpo-frozen-playground: the editor is not told what was written, so there is nothing to learn.
//
//   retouch train recipes/playground/writer-blind.jsonnet
(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-blind',
  renderer+: { blind: true },
}
