// Text rendering on the playground: a tiny FLUX.1-Fill writes words on signs, and RapidOCR reads them.
local sampling = import 'sampling.libsonnet';

{
  tasks(wrong_letters=0):: { kind: 'playground-words', count: 100000, wrong_letters: wrong_letters },
  base(name):: {
    name: name,
    steps: 40,
    tasks_per_step: 8,
    group_size: 8,
    learning_rate: 3e-4,
    microbatch: 64,
    policy: {
      kind: 'denoising',
      model: { kind: 'playground-words' },
      train: { kind: 'full' },
      ema: { decay: 0.9 },
    },
    rollout: sampling.window(num_steps=6, size=2, high=4, transition=sampling.cps(0.7)),
    data: $.tasks(),
    // Signs are three times as wide as high: 144 px at the height of 48 px that the OCR uses.
    reward: { kind: 'ocr', where: 'box', line_width: 160, combine: { correctness: 1 } },
    advantage: { kind: 'group' },
    optimizer: { schedule: 'cosine' },
    eval: { tasks: 150, every: 10, column: 'correctness', batch: 150 },
    samples: { every: 20, tasks: 8 },
    checkpoints: { every: 20, keep: 1 },
  },
}
