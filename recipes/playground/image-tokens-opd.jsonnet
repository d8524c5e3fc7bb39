// On the playground: an image-token model trained on simple edits teaches itself complex ones, without a judge and without targets.
// The teacher is the same model, which makes the edits of an instruction one after the other, each on the image before.
// `python measurements/playground/edit_by_edit.py --recipe recipes/playground/image-tokens-opd.jsonnet` measures the teacher itself.
//
//   retouch train recipes/playground/image-tokens-opd.jsonnet
//
// Look at: `policy/loss`, the KL to the teacher per token, falls steadily; IP rises on complex edits, because the base model damages
// what it should keep.
local emu3 = import '../lib/emu3_playground.libsonnet';
local playground = import '../lib/playground.libsonnet';

emu3.rl('image-tokens-opd', 's', 'sc') {
  tasks_per_step: 64,
  group_size: 1,
  learning_rate: 1e-3,
  data: playground.tasks({ '1': 1, '2': 2, '3': 2 }, filler=0.25) + { thought: true },
  objective: { kind: 'opd', teachers: { 'edit-by-edit': { instructions: 'instructions' } } },
}
