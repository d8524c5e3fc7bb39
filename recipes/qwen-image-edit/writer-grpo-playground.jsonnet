// The playground's twin of writer-grpo.jsonnet. Like writer-grpo-frozen-playground, but the trained writer itself encodes the
// prompt for the editor.
//
//   retouch train recipes/qwen-image-edit/writer-grpo-playground.jsonnet
(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-grpo-playground',
  renderer+: { encoder: 'policy' },
}
