// The playground: its editor and its text-to-image model, their tasks and exact judges.
{
  model: { kind: 'playground' },
  tasks(complexity, count=20000, seed=0, filler=0.5, vain=0):: {
    kind: 'playground',
    complexity: complexity,
    count: count,
    seed: seed,
    filler: filler,
    vain: vain,
  },
  indirect(complexity, lazy=0):: { kind: 'playground-indirect', complexity: complexity, count: 100000, lazy: lazy },
  judge: { kind: 'playground', combine: { overall: 1 } },
  painter: { kind: 'playground-painter' },
  paintings(complexity, count=100000, lazy=0):: {
    kind: 'playground-paintings',
    complexity: complexity,
    count: count,
    lazy: lazy,
  },
  painting_judge: { kind: 'playground-paintings', combine: { overall: 1 } },
}
