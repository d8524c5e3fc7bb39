// An image-token model that was trained on single edits teaches itself instructions with two or three, without a judge and without
// target images. It imitates its own images: the base model makes the edits of an instruction one after the other, each on the image
// before. `python measurements/playground/edit_by_edit.py --recipe recipes/playground/image-tokens-opd.jsonnet` measures this teacher.
//
//   retouch train recipes/playground/image-tokens-self-taught.jsonnet
//
// RL may follow: `--set phases.1.steps=150`. docs/results.md has three seeds without it.
//
// Look at: `policy/loss`, the cross-entropy of the teacher's tokens, falls. IP of complex edits rises with the score, because the base
// model damages what it should keep when it reads several edits.
local emu3 = import '../lib/emu3_playground.libsonnet';

emu3.rl('image-tokens-self-taught', 's', 'sc') {
  steps: null,
  data+: { thought: true },
  phases: [
    {
      name: 'self-taught',
      steps: 600,
      tasks_per_step: 64,
      group_size: 1,
      learning_rate: 1e-3,
      objective: { kind: 'sft', teacher: { instructions: 'instructions' } },
    },
    { name: 'rl', steps: 0 },
  ],
  eval+: { every: 200 },
}
