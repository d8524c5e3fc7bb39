// Diffusion DPO for text rendering: the preference pair of each task is its best and its worst image.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-dpo',
  steps: 40,
  objective: { kind: 'dpo', shift: 3 },
}
