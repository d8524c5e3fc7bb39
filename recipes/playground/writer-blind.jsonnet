// A control for writer-grpo-frozen-playground: the editor does not receive the prompt that was written, so there is nothing to
// learn.
//
//   retouch train recipes/playground/writer-blind.jsonnet
(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-blind',
  renderer+: { ignore_completions: true },
}
