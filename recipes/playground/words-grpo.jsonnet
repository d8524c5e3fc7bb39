// GRPO for text rendering: a model that was trained on demonstrations with wrong letters learns the right ones from an OCR reward.
local objectives = import '../lib/objectives.libsonnet';
local words = import '../lib/words.libsonnet';

words.base('words-grpo') {
  objective: objectives.grpo(1e-4),
  eval+: { best_of_k: 4 },
}
