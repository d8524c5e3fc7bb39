// The recommended variant of writer-grpo: the editor's own encoder reads the response (writer-grpo-frozen), and identity
// preservation is part of the reward. Neither no change nor a completely new image is rewarded; the source's reward does reward the
// latter.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-identity.jsonnet --set data.allow_test_sets=true
//
// A healthy run looks like that of writer-grpo, and `reward/identity` does not fall while `reward/alignment` rises. The reward
// differs from the source's, so the source's figures do not apply.
local judges = import '../lib/judges.libsonnet';

(import 'writer-grpo-frozen.jsonnet') {
  name: 'writer-grpo-identity',
  reward: judges.alignment_identity_quality(judges.endpoint('gpt-4o')),
}
