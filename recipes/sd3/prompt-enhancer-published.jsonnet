// The values of a prompt enhancer's repository (train_grpo.py) in prompt-enhancer.jsonnet: 50 iterations of two prompts, three
// epochs on each rollout, a learning rate of 1e-5, a KL weight of 0.05 to the untrained model and a bonus of 0.02 for entropy.
//
//   retouch train recipes/sd3/prompt-enhancer-published.jsonnet
//
// Different here: eight completions per prompt instead of one, because a single completion has no baseline; 100 new tokens, as the
// source's README says, because 12 tokens, as in the script, are rarely a whole prompt; and no discount over prompts, which are
// independent. To bound how far a rewritten prompt may drift from the user's prompt, compare the two with a sentence encoder:
//
//   --set reward.rewards.sentence.kind=sentence_similarity \
//   --set reward.combine='clip/similarity - max(0.7 - sentence/kept, 0)'
//
// A healthy run looks like that of prompt-enhancer, and `policy/entropy` falls more slowly than without the bonus; if it keeps
// rising while `reward/clip/similarity` stays the same, lower `objective.entropy_bonus`. 50 steps of two prompts are a short run:
// expect no more than a first change of the reward. The source makes no claims about these values.
(import 'prompt-enhancer.jsonnet') {
  name: 'prompt-enhancer-published',
  steps: 50,
  epochs: 3,
  tasks_per_step: 2,
  objective+: { kl: { kind: 'k3', weight: 0.05 }, entropy_bonus: 0.02 },
  eval+: { every: 10 },
  samples+: { every: 10 },
  checkpoints+: { every: 10 },
}
