// The playground's twin of writer-grpo.jsonnet. As writer-grpo-frozen-playground, but the writer itself reads what it wrote for the
// editor, with what it has learnt.
//
//   retouch train recipes/qwen-image-edit/writer-grpo-playground.jsonnet
(import '../qwen-image-edit/writer-grpo-frozen-playground.jsonnet') {
  name: 'writer-grpo-playground',
  renderer+: { encoder: 'policy' },
}
