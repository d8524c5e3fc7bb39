// ReFL on the playground: DRaFT's setting, with the gradient of the image that the model predicts in one of the last four steps.
local objectives = import '../lib/objectives.libsonnet';
local draft = import 'draft.jsonnet';

draft {
  name: 'playground-refl',
  objective: objectives.refl(low=2, reward={ kind: 'target' }),
}
