// Beside writer-grpo: the editor's own text encoder reads what was written, so what the writer learns from stands still. On the
// playground this learns more and keeps the editor's pictures as they are (docs/results.md). Where the encoder's weights are the
// writer's, as published, they are held once.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-frozen.jsonnet --set data.allow_test_sets=true
//
// A healthy run is as writer-grpo's; the reward is a function of the words alone here, so held-out pictures of the untrained words
// stay what they were. The source has made no claims about this one.
(import 'writer-grpo.jsonnet') {
  name: 'writer-grpo-frozen',
  renderer+: { encoder: 'frozen' },
}
