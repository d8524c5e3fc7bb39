// Diffusion DPO on the word world: the best of a task's pictures is preferred to its worst.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-dpo',
  steps: 40,
  objective: { kind: 'dpo', shift: 3 },
}
