// The built-in world: its model, its tasks and its exact judge.
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
  judge: { kind: 'playground', combine: { overall: 1 } },
}
