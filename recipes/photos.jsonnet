// Your own photographs with the tiny models: the code path of a full-size run, in a minute.
//
//   retouch train recipes/photos.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with one line for each: {"file_name": "a.png", "instruction": "make it warmer"}.
local objectives = import 'lib/objectives.libsonnet';
local photos = import 'lib/photos.libsonnet';
local playground = import 'lib/playground.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'photos',
  steps: 20,
  tasks_per_step: 1,
  group_size: 12,
  learning_rate: 1e-3,
  policy: {
    kind: 'denoising',
    model: playground.model { size: [48, 48] },
    train: { kind: 'lora', rank: 32, alpha: 64 },
  },
  rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
  data: photos.tasks('photos', held_out=1),
  reward: photos.judge(colour=[200, 60, 40]),
  objective: objectives.grpo(1e-4),
  eval: { tasks: 8 },
  samples: { every: 10, tasks: 1 },
  checkpoints: { every: 10 },
}
