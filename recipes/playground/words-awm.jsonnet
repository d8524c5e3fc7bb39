// Advantage-weighted matching for text rendering, with a penalty on the distance from the reference. Without it the loss of images
// with a negative advantage is unbounded below: with `--set objective.reference_weight=0` the score falls to 0.08.
local words = import 'words-nft.jsonnet';

words {
  name: 'words-awm',
  steps: 40,
  objective: { kind: 'awm', shift: 3, reference_weight: 0.1 },
}
