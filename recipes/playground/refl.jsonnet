// ReFL on the playground: the settings of draft.jsonnet, with the gradient through the image predicted in one of the last four
// steps.
local objectives = import '../lib/objectives.libsonnet';
local draft = import 'draft.jsonnet';

draft {
  name: 'playground-refl',
  objective: objectives.refl(low=2, reward={ kind: 'target' }),
}
