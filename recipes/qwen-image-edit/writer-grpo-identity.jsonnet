// The recommended one beside writer-grpo: the editor's own encoder reads (writer-grpo-frozen), and what was to stay counts. Neither
// doing nothing nor painting all anew pays, which in the source's reward the latter does.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-identity.jsonnet --set data.allow_test_sets=true
//
// A healthy run is as writer-grpo's, and `reward/identity` does not fall while `reward/alignment` rises. The reward is not the
// source's, so neither are its figures.
local judges = import '../lib/judges.libsonnet';

(import 'writer-grpo-frozen.jsonnet') {
  name: 'writer-grpo-identity',
  reward: judges.alignment_identity_quality(judges.endpoint('gpt-4o')),
}
