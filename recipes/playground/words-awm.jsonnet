// Advantage-weighted matching on the word world.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-awm',
  steps: 40,
  objective: { kind: 'awm', shift: 3 },
}
