// GRPO on the word world: a painter that was taught from demonstrations with wrong letters learns, from a reader, to write the right ones.
local objectives = import '../lib/objectives.libsonnet';
local words = import '../lib/words.libsonnet';

words.base('words-grpo') {
  objective: objectives.grpo(1e-4),
  eval+: { best_of_k: 4 },
}
