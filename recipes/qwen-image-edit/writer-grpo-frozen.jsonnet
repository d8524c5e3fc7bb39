// Like writer-grpo, but the editor's own frozen text encoder reads the response, so the environment of the writer does not change
// during training. On the playground this variant learns more and preserves the quality of the editor's images (docs/results.md).
// If encoder and writer have the same published weights, the weights are held in memory once.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-frozen.jsonnet --set data.allow_test_sets=true
//
// A healthy run looks like that of writer-grpo. Here the reward depends only on the text, so the images for unchanged text stay the
// same. The source makes no claims about this variant.
(import 'writer-grpo.jsonnet') {
  name: 'writer-grpo-frozen',
  renderer+: { encoder: 'frozen' },
}
