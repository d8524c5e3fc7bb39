// DRaFT-K on the playground, to compare with grpo.jsonnet: same tasks, judge and number of samples. It follows the gradient of
// the distance to the target image, which the other algorithms never see, so its score is an upper reference.
local grpo = import 'grpo.jsonnet';
local objectives = import '../lib/objectives.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

grpo {
  name: 'playground-draft',
  rollout: sampling.pictures(6),
  objective: objectives.draft(steps=2, reward={ kind: 'target' }),
}
