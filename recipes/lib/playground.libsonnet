// The playground: its editor and its text-to-image model, their tasks and exact judges.
{
  model: { kind: 'playground' },
  tasks(complexity, count=20000, seed=0, filler=0.5, impossible=0):: {
    kind: 'playground',
    complexity: complexity,
    count: count,
    seed: seed,
    filler: filler,
    impossible: impossible,
  },
  indirect(complexity, incomplete=0):: { kind: 'playground-indirect', complexity: complexity, count: 100000, incomplete: incomplete },
  judge: { kind: 'playground', combine: { overall: 1 } },
  text_to_image: { kind: 'playground-text-to-image' },
  scenes(complexity, count=100000, incomplete=0):: {
    kind: 'playground-scenes',
    complexity: complexity,
    count: count,
    incomplete: incomplete,
  },
  // Prompts in the vocabulary of the text-to-image model, for scenes with more objects than the 1 to 4 that it was trained on.
  crowded(complexity):: { kind: 'playground-scenes', complexity: complexity, count: 100000, known_words: true },
  scene_judge: { kind: 'playground-scenes', combine: { overall: 1 } },
}
