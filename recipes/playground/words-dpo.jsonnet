// Diffusion DPO for text rendering: the best image of a task is preferred to its worst.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-dpo',
  steps: 40,
  objective: { kind: 'dpo', shift: 3 },
}
