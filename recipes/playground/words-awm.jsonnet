// Advantage-weighted matching on the word world, held to the reference: a bad picture's loss has no floor, and with
// `--set objective.reference_weight=0` the painter falls to 0.08.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-awm',
  steps: 40,
  objective: { kind: 'awm', shift: 3, reference_weight: 0.1 },
}
