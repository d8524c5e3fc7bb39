// GDPO on the playground, to compare with grpo.jsonnet: same tasks and number of samples. Following the instruction and keeping the
// rest of the image are normalised by themselves, so that the rarer of the two successes counts as much as the other one.
local grpo = import 'grpo.jsonnet';

grpo {
  name: 'playground-gdpo',
  reward+: { combine: { IF: 0.5, IP: 0.5 } },
  advantage: { kind: 'gdpo', weights: { IF: 0.5, IP: 0.5 } },
}
