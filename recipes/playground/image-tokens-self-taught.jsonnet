// An image-token model that was trained on single edits teaches itself instructions with two or three, without target images, and then
// learns from a judge. First it imitates its own images: the base model makes the edits of an instruction one after the other, each on
// the image before. Then RL as in EARL. `python measurements/playground/edit_by_edit.py --recipe recipes/playground/image-tokens-opd.jsonnet`
// measures the teacher itself.
//
//   retouch train recipes/playground/image-tokens-self-taught.jsonnet
//
// Look at: in the first phase `policy/loss`, the cross-entropy of the teacher's tokens, falls; the held-out table after it has a higher
// IP, because the base model damages what it should keep when it reads several edits.
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.rl('image-tokens-self-taught', 's', 'sc') {
  steps: null,
  data+: { thought: true },
  phases: [
    {
      name: 'self-taught',
      steps: 300,
      tasks_per_step: 64,
      group_size: 1,
      learning_rate: 1e-3,
      objective: { kind: 'sft', teacher: { instructions: 'instructions' } },
    },
    { name: 'rl', steps: 150 },
  ],
  eval+: { every: 300 },
}
