// A warm-up and then RL on triplets, on a laptop and without a download: a tiny, untrained model of FLUX.1-Fill's classes first
// imitates the images and then learns from a weighted sum of the OCR score and a second column. The resulting images are not
// meaningful; this recipe is for testing a folder of triplets, a reward or a change of the code. Items that cannot be used are
// skipped and reported with their line.
//
//   retouch train recipes/flux-fill/tiny.jsonnet --set data.path=DIR
//
// DIR contains self_bench.txt and test<number>_source.png, _mask.png, _ref.png. The known set with this layout is a benchmark and
// should not be used for training; to run it anyway: --set data.allow_test_sets=true
local objectives = import '../lib/objectives.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

{
  name: 'flux-fill-tiny',
  tasks_per_step: 1,
  group_size: 4,
  learning_rate: 1e-3,
  device: 'cpu',
  epochs: 2,
  microbatch: 8,
  policy: {
    kind: 'denoising',
    model: { kind: 'import', class: 'retouch_worlds.models.tiny_fill:TinyFluxFill', args: { seed: 0, size: [64, 64] } },
    train: { kind: 'full' },
  },
  rollout: sampling.window(num_steps=4, size=2, high=3, transition=sampling.sde(0.9)),
  data: {
    kind: 'triplets',
    path: 'triplets',
    reference: 'own',
    size: [64, 64],
    // One valid item is enough this way. With more items, hold some out and remove `eval.split`.
    held_out: 0,
    on_bad_row: 'skip',
  },
  reward: {
    kind: 'several',
    rewards: { ocr: { kind: 'ocr', where: 'mask' }, colour: { kind: 'share', channel: 'red' } },
    combine: { 'ocr/correctness': 0.7, 'colour/share': 0.3 },
  },
  objective: objectives.grpo(1e-4),
  phases: [
    { name: 'warm-up', steps: 4, objective: { kind: 'supervised' }, group_size: 1, tasks_per_step: 4, learning_rate: 3e-3 },
    { name: 'rl', steps: 4 },
  ],
  eval: { split: 'train', tasks: 4 },
  samples: { tasks: 4, groups: 1 },
}
